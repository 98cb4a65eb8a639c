# shellcheck shell=bash
if [[ $* == *--query-gpu=index,pcie* ]]; then
  echo "0, 16"
  echo "1, 8"
  exit 0
fi
