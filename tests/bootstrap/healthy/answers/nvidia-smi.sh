# shellcheck shell=bash
# every ANSWER...: one CSV line a GPU, with its index first where the question asks for it.
every() {
  local gpu
  for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, $1"; done
  exit 0
}
case "$*" in
  --list-gpus) exit 0 ;;
  *--query-gpu=name\ *) for _ in 0 1 2 3 4 5 6 7; do echo "NVIDIA A100-SXM4-40GB"; done && exit 0 ;;
  *--query-gpu=mig*) for _ in 0 1 2 3 4 5 6 7; do echo "Disabled"; done && exit 0 ;;
  *--query-gpu=index,ecc*) every "0, [N/A]" ;;
  *--query-remapped-rows=*) every "No, No" ;;
  *--query-gpu=index,pcie*) every 16 ;;
  *--query-gpu=index,fabric*) every "[N/A], [N/A]" ;;
  *--query-gpu=index,clocks*) every "Not Active, Not Active, Not Active, Not Active" ;;
  "nvlink --status")
    for gpu in 0 1 2 3 4 5 6 7; do
      echo "GPU $gpu: NVIDIA A100-SXM4-40GB (UUID: GPU-00000000-0000-0000-0000-00000000000$gpu)"
      for link in 0 1 2 3 4 5 6 7 8 9 10 11; do echo "	 Link $link: 25 GB/s"; done
    done
    exit 0
    ;;
esac
echo "fake nvidia-smi: no answer to $*" >&2
exit 9
