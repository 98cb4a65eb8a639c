#!/usr/bin/env bash
# Order: 60
# Every NVLink of every GPU is up, on types with NVLink.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# Links of one GPU: https://www.nvidia.com/en-us/data-center/nvlink/ (third to fifth generation, read 2026-11-21).
case $GPUFLEET_GPU in
  A100) expected=12 ;;
  H100 | H200 | B200 | B300 | GB200) expected=18 ;;
  # The cube mesh of p3 leaves some of its six links out on p3.8xlarge: the same number everywhere, above 0.
  V100) expected=same ;;
  *) exit 0 ;;
esac
if ((GPUFLEET_GPUS_PER_NODE == 1)); then
  log "one GPU: no peer to link to"
  exit 0
fi

status=$(nvidia-smi nvlink --status) || die "nvidia-smi cannot tell the NVLink status"
mapfile -t active < <(awk '
  /^GPU [0-9]+:/ { gpu++ }
  /Link [0-9]+:/ && /GB\/s/ { links[gpu]++ }
  END { for (i = 1; i <= gpu; i++) print links[i] + 0 }' <<<"$status")
((${#active[@]} == GPUFLEET_GPUS_PER_NODE)) || die "NVLink status tells of ${#active[@]} GPUs, the plan counts on $GPUFLEET_GPUS_PER_NODE"
if [[ $expected == same ]]; then expected=$((active[0] > 0 ? active[0] : 1)); fi
for gpu in "${!active[@]}"; do
  ((active[gpu] == expected)) || die "GPU $gpu: ${active[gpu]} NVLinks are active, $expected expected"
done

# From Hopper on a GPU joins the NVSwitch fabric only after the fabric manager set it up, and CUDA waits for it.
answer=$(query_gpus index,fabric.state,fabric.status)
while IFS=, read -r gpu state outcome; do
  case "${state# },${outcome# }" in
    Completed,Success | "[N/A],[N/A]" | N/A,N/A) ;;
    *) die "GPU $gpu: NVLink fabric is ${state# } with status ${outcome# }; journalctl -u nvidia-fabricmanager" ;;
  esac
done <<<"$answer"
log "$expected NVLinks active on each of ${#active[@]} GPUs"
