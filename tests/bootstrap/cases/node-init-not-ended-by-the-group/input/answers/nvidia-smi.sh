# shellcheck shell=bash
if [[ $* == "nvlink --status" ]]; then
  for gpu in 0 1 2 3 4 5 6 7; do
    echo "GPU $gpu: NVIDIA A100-SXM4-40GB (UUID: GPU-0$gpu)"
    for link in 0 1 2 3 4 5 6 7 8 9 10; do echo "	 Link $link: 25 GB/s"; done
    if ((gpu == 5)); then echo "	 Link 11: <inactive>"; else echo "	 Link 11: 25 GB/s"; fi
  done
  exit 0
fi
