#!/usr/bin/env bash
# Order: 120
# Compares gradients and exchanges of this node's GPUs, before a run is paid for.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

mkdir -p "$LOG_DIR" "$STATE_DIR"
report=$LOG_DIR/smoke.json
if [[ -f $STATE_DIR/smoke-passed ]]; then
  log "the smoke test has passed on this node"
  exit 0
fi
load_runtime_env
export GPUFLEET_PYTHON=$ROOT${GPUFLEET_PYTHON:-}
[[ -n ${GPUFLEET_IMAGE:-} || (-f $GPUFLEET_PYTHON && -x $GPUFLEET_PYTHON) ]] ||
  die "no Python with torch; install-python-env.sh comes first"

# By address: a VPC without DNS does not resolve the host's name.
torchrun=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$GPUFLEET_GPUS_PER_NODE")
# With EFA's settings, as training has, so a plugin that NCCL cannot load fails here and not in the first step.
agent run-python "${torchrun[@]}" -m bootstrap.smoke --device cuda --time-limit-s "$SMOKE_TIMEOUT_S" >"$report" ||
  die "the smoke test failed: see the lines above, and $report where rank 0 lived to write it"
touch "$STATE_DIR/smoke-passed"
