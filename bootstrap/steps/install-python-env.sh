#!/usr/bin/env bash
# Order: 90
# Makes sure there is a Python with torch and what the command imports; writes its path to runtime.env.
#
# The image's torch is used where it is new enough. What is missing comes as wheels from the stack's bucket into an
# environment beside it, without an index: private subnets reach none. Wheels are unpacked on the NVMe disks.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

venv=$ROOT/opt/gpufleet/venv
# The environment of a Deep Learning AMI with PyTorch:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html
image=$ROOT/opt/pytorch/bin/python3
own=$BOOTSTRAP_DIR/requirements-own.txt # gpufleet:requirements, where it is set
node_list=$BOOTSTRAP_DIR/requirements-node.txt torch_list=$BOOTSTRAP_DIR/requirements-torch.txt
# This environment serves the copy of data alone, if training runs in a container (pull-image.sh).
in_image=${GPUFLEET_IMAGE:-}
copies=$([[ ${GPUFLEET_TRAIN_DATA:-} != s3://* ]] || echo boto3)
modules=$(imported_modules)
if [[ -n $in_image ]]; then modules=boto3; fi
modules=${modules:-$copies}

has_torch() {
  local torch nccl gpu
  [[ -x $1 ]] || return 1
  if [[ -n $in_image ]]; then return 0; fi # the image's counts
  read -r torch nccl gpu < <("$1" -c "$TORCH_PROBE" 2>/dev/null) || return 1
  version_at_least "$torch" "$TORCH_MIN" && [[ $gpu == True ]] || return 1
  log "${1#"$ROOT"} has torch $torch with NCCL $nccl and sees the GPU"
  # Older ones train too; smoke test and training use the same library.
  version_at_least "$nccl" "$TORCH_NCCL_MIN" || log "WARN torch's NCCL $nccl is older than the tested $TORCH_NCCL_MIN"
}

imports() {
  [[ -z $modules ]] || "$1" -c "import $modules"
}

# use PYTHON: give it to gpufleet-train.service, and exit.
use() {
  "$1" -c 'import boto3' 2>/dev/null ||
    log "WARN ${1#"$ROOT"} has no boto3 for checkpoints in S3 (gpufleet stack wheels --stack NAME packs it)"
  set_runtime GPUFLEET_PYTHON "${1#"$ROOT"}"
  exit 0
}

wanted=$(cat "$node_list" "$torch_list" "$own" 2>/dev/null || true)
if [[ $(cat "$venv/requirements" 2>/dev/null || true) == "$wanted" ]] && has_torch "$venv/bin/python3"; then
  use "$venv/bin/python3"
fi
torch_of=""
if has_torch "$image"; then
  torch_of=$image
  if [[ ! -e $own ]] && imports "$image" 2>/dev/null; then use "$image"; fi
fi

work=$(mktemp --directory --tmpdir="$([[ -d $NVME_MOUNT ]] && echo "$NVME_MOUNT" || echo "${TMPDIR:-/tmp}")")
trap 'rm -rf "$work"' EXIT
wheels=s3://$GPUFLEET_BUCKET/$WHEELS_KEY
rm -rf "$venv"
# Without pip: the module venv is in Ubuntu's Python itself, ensurepip in a package python3-venv that AWS's release notes
# do not name: https://packages.ubuntu.com/noble/amd64/libpython3.12-stdlib/filelist
"${torch_of:-python3}" -m venv --without-pip "$venv" || die "${torch_of:-python3} cannot make an environment"
if retry 3 aws s3 cp --only-show-errors --region "$GPUFLEET_REGION" "$wheels" "$work/wheels.tar"; then
  tar --extract --file "$work/wheels.tar" --directory "$work" --no-same-owner
  rm "$work/wheels.tar"
  pip=$(find "$work" -name 'pip-*.whl')
  [[ -f $pip ]] || end_run "$wheels has no wheel of pip: pack it again with gpufleet stack wheels"
  assert_sha256 "$pip" "$(grep --after-context=1 '^pip==' "$node_list" | sed --silent 's/.*sha256:\([0-9a-f]*\).*/\1/p')"
  install=("$venv/bin/python3" "$pip/pip" install --no-index --find-links "$work")
elif [[ -n $in_image && -z $copies ]]; then
  use "${torch_of:-$ROOT/usr/bin/python3}"
else
  log "$wheels cannot be read: trying a package index"
  pip=(-m pip)
  if ! "$venv/bin/python3" -m ensurepip >/dev/null 2>&1; then
    # The image's own pip installs into the environment too, whose packages it would take for installed.
    pip=("$("${torch_of:-python3}" -c 'import pip; print(pip.__path__[0])')") ||
      die "${torch_of:-python3} has neither ensurepip (Ubuntu's python3-venv) nor pip: give the image one of them"
  fi
  install=("$venv/bin/python3" "${pip[@]}" install --ignore-installed --timeout 15 --retries 2)
fi
# Each list is complete, and pip takes a file only with the SHA-256 that the list in the bundle has.
install+=(--quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes)
lists=(--requirement "$node_list")
if [[ -n $torch_of ]]; then
  # A directory after the environment's own, so its packages win over the image's.
  PURELIB='import sysconfig; print(sysconfig.get_path("purelib"))'
  printf 'import site; site.addsitedir("%s")\n' "$("$torch_of" -c "$PURELIB")" \
    >"$("$venv/bin/python3" -c "$PURELIB")/image.pth"
elif [[ -z $in_image ]]; then
  lists+=(--requirement "$torch_list")
fi
next="pack the wheels again (gpufleet stack wheels --stack NAME; docs/bootstrap.md, 'Wheels')"
TMPDIR=$work "${install[@]}" "${lists[@]}" || die "the trainer's packages cannot be installed: $next"
if [[ -e $own ]]; then
  # Last, so that their versions stay; torch is the image's, or that of our list.
  PYTHONPATH=${BOOTSTRAP_DIR%/*} python3 -m bootstrap.contract.requirements "$torch_list" "$own" >"$work/own.txt" ||
    die "gpufleet:requirements cannot be read"
  TMPDIR=$work "${install[@]}" --requirement "$work/own.txt" || die "gpufleet:requirements cannot be installed: $next"
fi
has_torch "$venv/bin/python3" || die "the new environment's torch does not see the GPU, or is not $TORCH_MIN"
imports "$venv/bin/python3" || die "the new environment cannot import $modules"
printf '%s' "$wanted" >"$venv/requirements"
use "$venv/bin/python3"
