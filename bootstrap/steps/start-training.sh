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
# journald bounds its files, and hands each line to rsyslog too, whose copy Ubuntu rotates once a week whatever its size:
# https://manpages.debian.org/bookworm/systemd/journald.conf.5.en.html (ForwardToSyslog=)
if [[ -d $ROOT/etc/rsyslog.d ]]; then
  echo ':programname, isequal, "gpufleet-train" stop' >"$ROOT/etc/rsyslog.d/10-gpufleet.conf"
  systemctl try-restart rsyslog.service || log "rsyslog keeps a copy of the training's output"
fi
systemctl daemon-reload
# Enabled too: it starts again after a reboot.
systemctl enable --now gpufleet-train.service
log "gpufleet-train.service started"
