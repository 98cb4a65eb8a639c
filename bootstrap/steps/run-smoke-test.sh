#!/usr/bin/env bash
# Order: 120
# Compares products and exchanges of this node's GPUs, before a run is paid for.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

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

arguments=(--device cuda --nproc "$(gpu_count)" --time-limit-s "$SMOKE_TIMEOUT_S")
# With EFA's settings, as training has, so a plugin that NCCL cannot load fails here and not in the first step.
agent run-python -m bootstrap.smoke "${arguments[@]}" >"$report" || die "the smoke test failed: see the lines above, and $report where rank 0 lived to write it"
touch "$STATE_DIR/smoke-passed"
