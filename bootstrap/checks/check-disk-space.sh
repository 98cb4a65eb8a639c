#!/usr/bin/env bash
# Order: 90
# Root volume and instance-store disks have DISK_MIN_FREE_GIB free.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

enough() {
  local free_gib
  free_gib=$(df --output=avail --block-size=GiB "$1" | tail -n 1 | tr --delete ' G i B')
  ((free_gib >= DISK_MIN_FREE_GIB)) || die "$1 has $free_gib GiB free, at least $DISK_MIN_FREE_GIB are needed"
}

enough "$ROOT/"
if mountpoint --quiet "$NVME_MOUNT"; then enough "$NVME_MOUNT"; fi
