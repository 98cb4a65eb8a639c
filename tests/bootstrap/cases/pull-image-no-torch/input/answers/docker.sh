# shellcheck shell=bash
if [[ $* == *"import torch"* ]]; then
  echo "ModuleNotFoundError: No module named 'torch'" >&2
  exit 1
fi
