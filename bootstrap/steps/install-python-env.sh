#!/usr/bin/env bash
# Order: 90
# Makes sure there is a Python with the pinned torch; writes its path to runtime.env. Unpacks wheels on the NVMe disks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
source "$BOOTSTRAP_DIR/versions.sh"
load_node_env
require_env GPUFLEET_BUCKET GPUFLEET_REGION

venv=$ROOT/opt/gpufleet/venv
# Prints the versions of torch and its NCCL, and whether torch sees a GPU; checkpoints in S3 need boto3.
PROBE='import torch, boto3; print(torch.__version__.split("+")[0], ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.is_available())'

probe() {
  local torch nccl gpu
  [[ -x $1 ]] || return 1
  read -r torch nccl gpu < <("$1" -c "$PROBE" 2>/dev/null) || return 1
  version_at_least "$torch" "$TORCH_MIN" && version_at_least "$nccl" "$TORCH_NCCL_MIN" && [[ $gpu == True ]] || return 1
  # The reference trainer's libraries, which a PyTorch image may lack.
  [[ ${GPUFLEET_TRAIN_COMMAND:-} != "-m bootstrap.trainer" ]] ||
    "$1" -c 'import transformers, torchvision' 2>/dev/null || return 1
  log "${1#"$ROOT"} has torch $torch with NCCL $nccl and sees the GPU"
}

# use PYTHON: give it to gpufleet-train.service, and exit.
use() {
  set_runtime GPUFLEET_PYTHON "${1#"$ROOT"}"
  exit 0
}

# Our own environment, then a PyTorch Deep Learning AMI's.
for python in "$venv/bin/python3" "$ROOT/opt/pytorch/bin/python3"; do
  if probe "$python"; then use "$python"; fi
done

# Private subnets reach the stack's bucket and no package index, which is the fallback. pip takes a wheel only with its
# SHA-256 of requirements-node.txt.
work=$(mktemp --directory --tmpdir="$([[ -d $NVME_MOUNT ]] && echo "$NVME_MOUNT" || echo "${TMPDIR:-/tmp}")")
trap 'rm -rf "$work"' EXIT
wheels=s3://$GPUFLEET_BUCKET/$WHEELS_KEY
source_arguments=(--timeout 15 --retries 2)
if retry 3 aws s3 cp --only-show-errors --region "$GPUFLEET_REGION" "$wheels" "$work/wheels.tar"; then
  tar --extract --file "$work/wheels.tar" --directory "$work"
  source_arguments=(--no-index --find-links "$work")
else
  log "$wheels cannot be read: trying a package index"
fi
rm -rf "$venv"
python3 -m venv "$venv" || die "python3 cannot make an environment (Ubuntu's package is python3-venv)"
TMPDIR=$work "$venv/bin/python3" -m pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes \
  "${source_arguments[@]}" --requirement "$BOOTSTRAP_DIR/requirements-node.txt" ||
  die "torch cannot be installed: put them into $wheels (docs/bootstrap.md, 'Wheels for private subnets')"
probe "$venv/bin/python3" || die "the new environment's torch does not see the GPU, or is not $TORCH_MIN"
use "$venv/bin/python3"
