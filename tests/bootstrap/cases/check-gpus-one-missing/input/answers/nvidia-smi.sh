# shellcheck shell=bash
if [[ $* == *--query-gpu=name\ * ]]; then
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  echo "NVIDIA A100-SXM4-40GB"
  exit 0
fi
