# shellcheck shell=bash
if [[ $* == *bootstrap.smoke* ]]; then
  echo "net=$NCCL_NET plugin=$NCCL_NET_PLUGIN provider=$FI_PROVIDER path=$LD_LIBRARY_PATH" >&2
fi
