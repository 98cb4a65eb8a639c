#!/usr/bin/env bash
# Order: 20
# The GPUs have the plan's number and model.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

# words TEXT: upper-case words, so that "L4" is not found in "NVIDIA L40S" nor "A100" in "A10G".
words() {
  tr '[:lower:]' '[:upper:]' <<<"$1" | tr --complement --squeeze-repeats '[:alnum:]\n' ' '
}

answer=$(query_gpus name)
mapfile -t names <<<"$answer"
expected=$(gpu_count)
((${#names[@]} == expected)) || die "${#names[@]} GPUs answer, the plan counts on $expected: a GPU is missing or broken"
read -ra wanted <<<"$(words "$GPUFLEET_GPU")"
for name in "${names[@]}"; do
  have=" $(words "$name") "
  for word in "${wanted[@]}"; do
    [[ $have == *" $word "* ]] || die "a GPU is \"$name\", the plan counts on $GPUFLEET_GPU"
  done
done
log "$expected x ${names[0]}"
