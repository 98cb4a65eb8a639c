#!/usr/bin/env bash
# Installs and starts gpufleet-train.service, also without a training command: the service leaves cleanly when the group
# ends the node.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

if systemctl is-active --quiet gpufleet-train.service; then
  log "gpufleet-train.service runs"
  exit 0
fi
[[ -f $BOOTSTRAP_DIR/agent/__main__.py ]] || die "$BOOTSTRAP_DIR/agent is missing from the bundle"
install -D --mode 0644 "$BOOTSTRAP_DIR/gpufleet-train.service" "$ROOT/etc/systemd/system/gpufleet-train.service"
# Upgrades of packages take processors and disks, and may restart services (needrestart), while the ranks train in step.
systemctl mask --now --runtime apt-daily.timer apt-daily-upgrade.timer || log "packages may be upgraded while training"
systemctl daemon-reload
# Enabled too: it starts again after a reboot.
systemctl enable --now gpufleet-train.service
log "gpufleet-train.service started"
