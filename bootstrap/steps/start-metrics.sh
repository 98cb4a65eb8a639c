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
if systemctl is-active --quiet gpufleet-metrics.service; then
  log "gpufleet-metrics.service runs"
  exit 0
fi
install -D --mode 0644 "$BOOTSTRAP_DIR/gpufleet-metrics.service" "$ROOT/etc/systemd/system/gpufleet-metrics.service"
if systemctl daemon-reload && systemctl enable --now gpufleet-metrics.service; then
  log "gpufleet-metrics.service started"
else
  log "gpufleet-metrics.service did not start: this node publishes no metrics; journalctl -u gpufleet-metrics"
fi
