#!/usr/bin/env bash
# find-broken-gpu.sh [--xid]: prints the GPU fault that makes this node unable to train; nothing without one. With --xid
# only the kernel's messages are read, which takes no time of the GPUs.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

fault=$(fatal_xid_error)
if [[ -z $fault && ${1:-} != --xid ]] && command -v nvidia-smi >/dev/null; then
  expected=$GPUFLEET_GPUS_PER_NODE
  answering=0
  # nvidia-smi hangs on a GPU that fell off the bus; killed, it may stay in the driver with its output open, so that
  # read has a limit too. Of a lost GPU it writes a sentence: https://github.com/NVIDIA/dcgm-exporter/issues/604
  while read -r -t "$((GPU_ANSWER_LIMIT_S + 10))" line; do
    if [[ $line =~ ^[0-9]+,\ [^[] ]]; then answering=$((answering + 1)); fi
  done < <(timeout --kill-after=5 "$GPU_ANSWER_LIMIT_S" nvidia-smi --query-gpu=index,name --format=csv,noheader 2>/dev/null)
  ((answering >= expected)) || fault="$answering of $expected GPUs answer"
fi
printf '%s' "$fault"
