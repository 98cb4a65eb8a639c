#!/usr/bin/env bash
# Order: 30
# No GPU memory has uncorrected errors, or waits to be retired or remapped.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Fields a GPU does not have answer [N/A]: Volta and Turing retire pages, Ampere and later remap rows; vGPUs have
# neither. https://docs.nvidia.com/deploy/dynamic-page-retirement/ and
# https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/
bad=0
judge() { # judge GPU FIELD VALUE HEALTHY
  case $3 in
    "$4" | "[N/A]" | "N/A" | "[Not Supported]") ;;
    *)
      log "FAIL GPU $1: $2 is $3, not $4"
      bad=1
      ;;
  esac
}

answer=$(query_gpus index,ecc.errors.uncorrected.volatile.total,retired_pages.pending)
while IFS=, read -r gpu uncorrected retired; do
  judge "$gpu" "uncorrected ECC errors since the driver was loaded" "${uncorrected# }" 0
  judge "$gpu" "page retirement pending" "${retired# }" No
done <<<"$answer"
case $GPUFLEET_GPU in
  V100 | T4 | T4G) exit "$bad" ;;
esac
answer=$(nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure --format=csv,noheader) ||
  die "nvidia-smi cannot answer remapped rows"
if [[ $answer == *,* ]]; then
  while IFS=, read -r gpu pending failure; do
    judge "$gpu" "row remapping pending" "${pending# }" No
    judge "$gpu" "row remapping failure" "${failure# }" No
  done <<<"$answer"
fi
exit "$bad"
