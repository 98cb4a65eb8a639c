#!/usr/bin/env bash
# Installs gpufleet-lease.timer and starts it. A node without it could outlive the meter, so a failure ends the node.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

for unit in gpufleet-lease.service gpufleet-lease.timer; do
  install -D --mode 0644 "$BOOTSTRAP_DIR/$unit" "$ROOT/etc/systemd/system/$unit"
done
systemctl daemon-reload
systemctl enable --now gpufleet-lease.timer || die "gpufleet-lease.timer did not start"
log "gpufleet-lease.timer started"
