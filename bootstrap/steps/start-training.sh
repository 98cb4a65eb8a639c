#!/usr/bin/env bash
# Installs gpufleet-train.service and starts it, where the plan has a training command.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

if [[ -z ${GPUFLEET_TRAIN_COMMAND:-} ]]; then
  log "no training command: the node waits for one"
  exit 0
fi
if systemctl is-active --quiet gpufleet-train.service; then
  log "gpufleet-train.service runs"
  exit 0
fi
[[ -x $BOOTSTRAP_DIR/launch.sh ]] || die "$BOOTSTRAP_DIR/launch.sh is missing from the bundle"
install -D --mode 0644 "$BOOTSTRAP_DIR/gpufleet-train.service" "$ROOT/etc/systemd/system/gpufleet-train.service"
systemctl daemon-reload
# Enabled too: it starts again after a reboot.
systemctl enable --now gpufleet-train.service
log "gpufleet-train.service started"
