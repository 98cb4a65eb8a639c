#!/usr/bin/env bash
# The NVIDIA driver is loaded and answers.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

[[ -r $ROOT/proc/driver/nvidia/version ]] || die "the NVIDIA kernel module is not loaded"
nvidia-smi --list-gpus >/dev/null || die "nvidia-smi ends with $? and cannot list the GPUs"
