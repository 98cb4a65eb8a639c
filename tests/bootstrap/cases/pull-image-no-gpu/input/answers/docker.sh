# shellcheck shell=bash
if [[ $* == *"import torch"* ]]; then
  echo "2.11.0 2.28.9 False"
  exit 0
fi
