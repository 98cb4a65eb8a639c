#!/usr/bin/env bash
# Stands in for every tool that would touch the machine, AWS or the network: records how it was called, then answers as
# the case says, else as a healthy p4d.24xlarge would. An answer is a snippet that exits where it knows the question.
set -euo pipefail
name=${FAKE_NAME:-${0##*/}}
printf '%s\n' "$name${*:+ $*}" >>"$FAKE_CALLS"
for answers in "$FAKE_CASE/input/answers" "$FAKE_HEALTHY/answers"; do
  if [[ -f $answers/$name.sh ]]; then
    # shellcheck source=/dev/null
    source "$answers/$name.sh"
  fi
done
