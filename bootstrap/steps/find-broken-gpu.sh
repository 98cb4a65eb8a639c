#!/usr/bin/env bash
# find-broken-gpu.sh [--xid]: prints the GPU fault that makes this node unable to train; nothing without one. With --xid
# only the kernel's messages are read, which takes no time of the GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

fault=$(fatal_xid_error)
if [[ -z $fault && ${1:-} != --xid ]] && command -v nvidia-smi >/dev/null; then
  expected=$(gpu_count)
  # With a time limit: nvidia-smi hangs on a GPU that fell off the bus.
  answering=$(timeout --kill-after=5 60 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc --lines || true)
  ((answering >= expected)) || fault="$answering of $expected GPUs answer"
fi
printf '%s' "$fault"
