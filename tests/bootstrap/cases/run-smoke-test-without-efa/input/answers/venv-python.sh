# shellcheck shell=bash
if [[ $* == *bootstrap.smoke* ]]; then echo "net=${NCCL_NET:-none}" >&2; fi
