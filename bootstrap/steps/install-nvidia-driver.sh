#!/usr/bin/env bash
# Order: 30
# Makes sure the NVIDIA driver is loaded and new enough; installs and holds the pinned driver on a custom image.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

loaded_version() {
  # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build ..."
  sed --silent 's/^NVRM version:.*[[:space:]]\([0-9][0-9]*\.[0-9][0-9.]*\)[[:space:]].*/\1/p' \
    "$ROOT/proc/driver/nvidia/version" 2>/dev/null || true
}

version=$(loaded_version)
if [[ -n $version ]] && version_at_least "$version" "$NVIDIA_DRIVER_MIN"; then
  log "driver $version is loaded (at least $NVIDIA_DRIVER_MIN)"
  exit 0
fi
# A broken GPU can keep the image's driver from loading, and the next node's may load.
[[ -n $version || ${GPUFLEET_AMI_KIND:-} == custom ]] || die "the NVIDIA module is not loaded"
assert_may_install "the NVIDIA driver" "$version" "$NVIDIA_DRIVER_MIN"
# A loaded module cannot be replaced, and a reboot would use up the launch hook's time.
[[ -z $version ]] || end_run "driver $version is loaded and below $NVIDIA_DRIVER_MIN: build the image with a newer one"

# Volta has no GSP, which the open kernel modules need: https://github.com/NVIDIA/open-gpu-kernel-modules
flavour=nvidia-open-$NVIDIA_DRIVER_BRANCH
[[ $GPUFLEET_GPU != V100 ]] || flavour=cuda-drivers-$NVIDIA_DRIVER_BRANCH
packages=("$flavour=$NVIDIA_DRIVER_PIN")
# Several GPUs on an NVSwitch need a fabric manager of exactly the driver's version; it does not start for one GPU.
if ((GPUFLEET_GPUS_PER_NODE > 1)); then
  case $GPUFLEET_GPU in
    A100 | H100 | H200) packages+=("nvidia-fabricmanager=$NVIDIA_DRIVER_PIN") ;;
    B200 | B300 | GB200) die "NVLink 5 needs NVIDIA's subnet manager too (nvlsm), which this step does not install: use a" \
      "Deep Learning AMI, or an image with driver, fabric manager and nvlsm" ;;
  esac
fi

"$BOOTSTRAP_DIR/steps/add-cuda-repository.sh"
# The packages depend on each other without versions; the pin keeps all at one version.
mkdir -p "$ROOT/etc/apt/preferences.d"
printf '%s\n' 'Package: *nvidia* cuda-drivers*' "Pin: version ${NVIDIA_DRIVER_PIN%%-*}-*" 'Pin-Priority: 1001' \
  >"$ROOT/etc/apt/preferences.d/gpufleet-nvidia"

apt_install "linux-headers-$(uname --kernel-release)"
apt_install "${packages[@]}"

modprobe nvidia || die "the NVIDIA module does not load; the build log is under /var/lib/dkms/nvidia"
systemctl enable --now nvidia-persistenced
if ((${#packages[@]} > 1)); then systemctl enable --now nvidia-fabricmanager; fi
log "driver $(loaded_version) installed and held"
