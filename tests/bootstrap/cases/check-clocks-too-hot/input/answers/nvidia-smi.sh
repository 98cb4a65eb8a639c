# shellcheck shell=bash
if [[ $* == *--query-gpu=index,clocks* ]]; then
  echo "0, Not Active, Not Active, Not Active, Not Active"
  echo "1, Active, Active, Not Active, Not Active"
  exit 0
fi
