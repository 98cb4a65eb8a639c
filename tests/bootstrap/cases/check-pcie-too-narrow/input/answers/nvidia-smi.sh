# shellcheck shell=bash
if [[ $* == *--query-gpu=index,pcie* ]]; then
  echo "0, 16"
  echo "1, 4"
  exit 0
fi
