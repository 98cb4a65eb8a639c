#!/usr/bin/env bash
# Installs and starts gpufleet-train.service, also without a training command: the service leaves cleanly when the group
# ends the node.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if systemctl is-active --quiet gpufleet-train.service; then
  log "gpufleet-train.service runs"
  exit 0
fi
[[ -f $BOOTSTRAP_DIR/agent/__main__.py ]] || die "$BOOTSTRAP_DIR/agent is missing from the bundle"
install -D --mode 0644 "$BOOTSTRAP_DIR/gpufleet-train.service" "$ROOT/etc/systemd/system/gpufleet-train.service"
# Upgrades of packages take processors and disks, and needrestart restarts services, while the ranks train in step. The
# masks outlive a reboot. A running upgrade ends by itself: half of a package would be worse. Periodic::Enable stops jobs
# that other timers begin (/usr/lib/apt/apt.systemd.daily); needrestart's mode l lists, and restarts nothing.
systemctl mask --now apt-daily.timer apt-daily-upgrade.timer || log "packages may be upgraded while training"
systemctl mask apt-daily.service apt-daily-upgrade.service unattended-upgrades.service ||
  log "packages may be upgraded while training"
timeout 30 snap refresh --hold || log "snaps may be refreshed while training"
mkdir -p "$ROOT/etc/apt/apt.conf.d" "$ROOT/etc/needrestart/conf.d"
echo 'APT::Periodic::Enable "0";' >"$ROOT/etc/apt/apt.conf.d/99-gpufleet"
echo "\$nrconf{restart} = 'l';" >"$ROOT/etc/needrestart/conf.d/99-gpufleet.conf"
systemctl daemon-reload
# Enabled too: it starts again after a reboot.
systemctl enable --now gpufleet-train.service
log "gpufleet-train.service started"
