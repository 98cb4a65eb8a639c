#!/usr/bin/env bash
# Installs and starts gpufleet-metrics.service; a node without metrics goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

set_runtime GPUFLEET_PROGRESS_FILE "${PROGRESS_FILE#"$ROOT"}"
if [[ -z ${GPUFLEET_METRIC_NAMESPACE:-} ]]; then
  log "no metrics: GPUFLEET_METRIC_NAMESPACE is empty"
  exit 0
fi
start_side_service gpufleet-metrics "this node publishes no metrics"
