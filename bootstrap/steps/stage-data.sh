#!/usr/bin/env bash
# Order: 130
# Copies gpufleet:data from S3 to the node's disk, or waits until its Lustre file system has all files, and tells the
# command where it is (GPUFLEET_DATA_DIR). After the tests, so that only a node that trains pays for the copy; before the
# node is in service, so that the others wait for it there.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

data=${GPUFLEET_TRAIN_DATA:-}
if [[ -z $data ]]; then
  log "no data to copy"
  exit 0
fi
linked=()
if [[ -n ${GPUFLEET_LUSTRE:-} ]]; then linked=("$LUSTRE_MOUNT"); fi
if [[ $data == s3://* ]]; then
  load_runtime_env
  [[ -z ${GPUFLEET_SCRATCH_DIR:-} ]] || export GPUFLEET_SCRATCH_DIR=$ROOT$GPUFLEET_SCRATCH_DIR
  python() { PYTHONPATH=${BOOTSTRAP_DIR%/*} "$ROOT$GPUFLEET_PYTHON" -m "$@"; }
  # The copy's progress goes to the training's log too, for `gpufleet status`. Its exit code 78 says that no node could do
  # better: its report (node_init.sh) ends the run.
  data=$({
    python bootstrap.training.staging "$data" "${linked[@]}" 2>&1 >&3 | { tee -a "$TRAIN_LOG" >&2 || true; }
  } 3>&1)
elif ((${#linked[@]})) && [[ ! -e $ROOT$data ]]; then
  end_run "$data is not on the file system $GPUFLEET_LUSTRE: name a folder that it has in gpufleet:data"
fi
set_runtime GPUFLEET_DATA_DIR "${data#"$ROOT"}"
# The trainer reads a folder of the node as it is, and would copy from S3.
if ((${#linked[@]})); then set_runtime GPUFLEET_TRAIN_DATA "${data#"$ROOT"}"; fi
