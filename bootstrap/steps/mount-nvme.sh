#!/usr/bin/env bash
# Order: 80
# Mounts the instance-store disks at /mnt/nvme: RAID 0, xfs. Changes only blank instance-store disks.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# use: give the mount to gpufleet-train.service, and exit.
use() {
  chmod 1777 "$NVME_MOUNT"
  set_runtime GPUFLEET_SCRATCH_DIR "${NVME_MOUNT#"$ROOT"}"
  exit 0
}

if mountpoint --quiet "$NVME_MOUNT"; then
  log "$NVME_MOUNT is mounted"
  use
fi

# EBS volumes are NVMe devices too; their model is "Amazon Elastic Block Store":
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/nvme-ebs-volumes.html
mapfile -t disks < <(lsblk --nodeps --noheadings --pairs --output PATH,TYPE,MODEL |
  sed --silent 's/^PATH="\([^"]*\)" TYPE="disk" MODEL="Amazon EC2 NVMe Instance Storage *"$/\1/p')
if ((${#disks[@]} == 0)); then
  log "no instance-store disks on this instance type"
  exit 0
fi
mkdir -p "$NVME_MOUNT"

# A Deep Learning AMI joins the disks itself (LVM, ext4).
dlami=$ROOT/opt/dlami/nvme
if systemctl cat dlami-nvme.service >/dev/null 2>&1; then systemctl start dlami-nvme.service; fi
if mountpoint --quiet "$dlami"; then
  mount --bind "$dlami" "$NVME_MOUNT"
  log "${#disks[@]} disks of the Deep Learning AMI's $dlami are at $NVME_MOUNT"
  use
fi

device=$(blkid --label gpufleet || true)
if [[ -z $device ]]; then
  for disk in "${disks[@]}"; do
    signatures=$(wipefs --no-act --noheadings "$disk") || die "$disk cannot be read"
    [[ -z $signatures ]] || die "$disk is not blank and not ours: not formatting it"
  done
  device=${disks[0]}
  if ((${#disks[@]} > 1)); then
    device=/dev/md/gpufleet
    mdadm --create "$device" --run --level=0 --name=gpufleet --raid-devices="${#disks[@]}" "${disks[@]}"
  fi
  mkfs.xfs -q -L gpufleet "$device"
fi
mount -o noatime "$device" "$NVME_MOUNT"
log "$device (${#disks[@]} disks) is at $NVME_MOUNT"
use
