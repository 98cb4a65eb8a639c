#!/usr/bin/env bash
# Every GPU has its PCIe lanes: as many as its peers, and not too few.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# Not compared with the slot's maximum: virtualised and eight-lane GPUs (T4, A10G) never reach it. The link's generation
# is not looked at: an idle GPU lowers it to save power.
answer=$(query_gpus index,pcie.link.width.current)
reference=""
while IFS=, read -r gpu width; do
  width=${width# }
  case $width in
    "[N/A]" | "N/A")
      log "GPU $gpu does not tell its PCIe width"
      continue
      ;;
  esac
  [[ $width =~ ^[0-9]+$ ]] || die "GPU $gpu: PCIe width is \"$width\""
  ((width >= PCIE_MIN_WIDTH)) || die "GPU $gpu: PCIe link has $width lanes, at least $PCIE_MIN_WIDTH are needed"
  : "${reference:=$width}"
  ((width == reference)) || die "GPU $gpu: PCIe link has $width lanes, the first GPU has $reference"
done <<<"$answer"
