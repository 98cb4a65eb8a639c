# shellcheck shell=bash
if [[ $* == *"import torch"* ]]; then
  echo "2.6.0 2.21.5 True"
  exit 0
fi
