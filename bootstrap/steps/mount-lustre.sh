#!/usr/bin/env bash
# Order: 85
# Mounts the Lustre file system of the training data (GPUFLEET_LUSTRE) at /mnt/lustre.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

if [[ -z ${GPUFLEET_LUSTRE:-} ]]; then
  log "no Lustre file system"
  exit 0
fi
if mountpoint --quiet "$LUSTRE_MOUNT"; then
  log "$LUSTRE_MOUNT is mounted"
  exit 0
fi
# https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html
if ! modprobe lustre || ! command -v mount.lustre >/dev/null; then
  end_run "this image has no Lustre client for kernel $(uname --kernel-release): name an image in gpufleet:amiName whose release" \
    "notes list lustre-client-modules of its kernel, or one of your own in gpufleet:amiId"
fi
mkdir -p "$LUSTRE_MOUNT"
# Options: https://docs.aws.amazon.com/fsx/latest/LustreGuide/mounting-ec2-instance.html
retry 3 mount -t lustre -o noatime,flock "$GPUFLEET_LUSTRE" "$LUSTRE_MOUNT" ||
  die "$GPUFLEET_LUSTRE cannot be mounted: ports 988 and 1018 to 1023 must be open between nodes and file system"
log "$GPUFLEET_LUSTRE is at $LUSTRE_MOUNT"
