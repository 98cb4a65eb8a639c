#!/usr/bin/env bash
# Order: 50
# Every GPU has at least PCIE_MIN_WIDTH PCIe lanes, and as many as its peers.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Virtualised and eight-lane GPUs (T4, A10G) never reach the slot's maximum, and an idle GPU lowers its link's
# generation to save power; so neither is checked.
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
