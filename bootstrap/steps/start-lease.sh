#!/usr/bin/env bash
# Order: 20
# Starts gpufleet-lease.timer, before any step that may fail: a node without a lease could outlive the meter.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

for unit in gpufleet-lease.service gpufleet-lease.timer; do
  install -D --mode 0644 "$BOOTSTRAP_DIR/$unit" "$ROOT/etc/systemd/system/$unit"
done
systemctl daemon-reload
systemctl enable --now gpufleet-lease.timer || die "gpufleet-lease.timer did not start"
log "gpufleet-lease.timer started"
