#!/usr/bin/env bash
# Order: 10
# The NVIDIA driver is loaded and answers.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

[[ -r $ROOT/proc/driver/nvidia/version ]] || die "the NVIDIA kernel module is not loaded"
nvidia-smi --list-gpus >/dev/null || die "nvidia-smi ends with $? and cannot list the GPUs"
