#!/usr/bin/env bash
# Order: 105
# Makes sure there is the unprivileged user that training runs as, and that it may use the GPUs and EFA cards; the
# folder of the training code is the user's. The NVMe disks (mount-nvme.sh) are open to all users, as /tmp is.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

user=gpufleet
if id "$user" >/dev/null 2>&1; then
  log "user $user is there"
else
  useradd --system --create-home --user-group --shell /usr/sbin/nologin "$user" || die "user $user could not be made"
  log "user $user made"
fi
# NVIDIA's driver and ib_uverbs make their devices with mode 0666.
closed=$(find "$ROOT/dev" -maxdepth 2 ! -type d ! -perm -006 \
  \( -name 'nvidia[0-9]*' -o -name nvidiactl -o -name 'nvidia-uvm*' -o -name 'uverbs*' \) 2>/dev/null | sort || true)
[[ -z $closed ]] || die "user $user may not use ${closed//$'\n'/, }: training does not run as root"
train=$ROOT/opt/gpufleet/train
[[ ! -d $train ]] || chown --recursive "$user:" "$train"
# Training adds copies of its own (weights) beside those of stage-data.sh. A link is not followed.
scratch=$(sed --silent 's/^GPUFLEET_SCRATCH_DIR=//p' "$RUNTIME_ENV" 2>/dev/null || true)
mkdir -p "$ROOT${scratch:-/tmp}/gpufleet-data"
chown --no-dereference "$user:" "$ROOT${scratch:-/tmp}/gpufleet-data"
set_runtime GPUFLEET_TRAIN_USER "$user"
