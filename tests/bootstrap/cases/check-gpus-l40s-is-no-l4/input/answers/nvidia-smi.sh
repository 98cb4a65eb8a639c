# shellcheck shell=bash
if [[ $* == *--query-gpu=name\ * ]]; then
  echo "NVIDIA L40S"
  exit 0
fi
