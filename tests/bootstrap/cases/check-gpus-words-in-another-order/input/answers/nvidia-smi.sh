# shellcheck shell=bash
if [[ $* == *--query-gpu=name\ * ]]; then
  echo "NVIDIA RTX PRO 6000 Blackwell Server Edition"
  exit 0
fi
