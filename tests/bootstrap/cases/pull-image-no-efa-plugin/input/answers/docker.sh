# shellcheck shell=bash
if [[ $* == *" efa-settings" ]]; then
  echo "NCCL_NET=AWS Libfabric"
  exit 0
fi
