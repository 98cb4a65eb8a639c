#!/usr/bin/env bash
# Order: 50
# Looks for a NCCL library for programs outside torch; installs it on an image of one's own.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Any version of the image's will do: training uses the NCCL of torch's environment.
shopt -s nullglob
libraries=("$ROOT"/usr/local/cuda*/lib*/libnccl.so.2.* "$ROOT"/usr/lib/*-linux-gnu/libnccl.so.2.*)
if ((${#libraries[@]} > 0)); then
  log "NCCL is there: ${libraries[0]#"$ROOT"}"
  exit 0
fi
skip_where_training_needs_none "the host's NCCL library" "" "$NCCL_PIN"

"$BOOTSTRAP_DIR/steps/add-cuda-repository.sh"
apt_install "libnccl2=$NCCL_PIN" "libnccl-dev=$NCCL_PIN"
log "NCCL $NCCL_PIN installed and held"
