#!/usr/bin/env bash
# Order: 40
# Looks for a CUDA toolkit for extensions compiled on the node; installs it on an image of one's own.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# The CUDA image keeps its version in version.json; nvcc is the fallback.
version=$(sed --silent '/"cuda"/,/}/ s/.*"version"[^"]*"\([0-9.]*\)".*/\1/p' "$ROOT/usr/local/cuda/version.json" 2>/dev/null | head -n 1 || true)
if [[ -z $version ]] && command -v nvcc >/dev/null; then
  version=$(nvcc --version | sed --silent 's/.*release \([0-9.]*\),.*/\1/p')
fi
if [[ -n $version ]] && version_at_least "$version" "$CUDA_MIN"; then
  log "CUDA toolkit $version is there (at least $CUDA_MIN)"
  exit 0
fi
skip_where_training_needs_none "the host's CUDA toolkit" "$version" "$CUDA_MIN"

"$BOOTSTRAP_DIR/steps/add-cuda-repository.sh"
apt_install "$CUDA_TOOLKIT_PACKAGE=$CUDA_PIN"
log "CUDA toolkit $CUDA_PIN installed and held"
