# shellcheck shell=bash
if [[ $* == *--query-gpu=name\ * ]]; then
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  echo "NVIDIA A10G"
  exit 0
fi
