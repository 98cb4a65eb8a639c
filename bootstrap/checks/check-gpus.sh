#!/usr/bin/env bash
# Order: 20
# The GPUs have the plan's number and model, and are whole.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

# words TEXT: upper-case words, so that "L4" is not found in "NVIDIA L40S" nor "A100" in "A10G".
words() {
  tr '[:lower:]' '[:upper:]' <<<"$1" | tr --complement --squeeze-repeats '[:alnum:]\n' ' '
}

answer=$(query_gpus name)
mapfile -t names <<<"$answer"
expected=$GPUFLEET_GPUS_PER_NODE
((${#names[@]} == expected)) || die "${#names[@]} GPUs answer, the plan counts on $expected: a GPU is missing or broken"
read -ra wanted <<<"$(words "$GPUFLEET_GPU")"
for name in "${names[@]}"; do
  have=" $(words "$name") "
  for word in "${wanted[@]}"; do
    [[ $have == *" $word "* ]] || die "a GPU is \"$name\", the plan counts on $GPUFLEET_GPU"
  done
done
# An image may have cut them into MIG instances, which share no memory and no NVLink ([N/A]: a GPU without MIG):
# https://docs.nvidia.com/datacenter/tesla/mig-user-guide/deployment-considerations.html
answer=$(query_gpus mig.mode.current)
if grep --quiet --line-regexp Enabled <<<"$answer"; then
  die "MIG is enabled, the plan counts on whole GPUs: turn it off in the image (nvidia-smi --multi-instance-gpu 0)"
fi
log "$expected x ${names[0]}"
