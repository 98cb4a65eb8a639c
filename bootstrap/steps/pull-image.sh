#!/usr/bin/env bash
# Order: 115
# Pulls gpufleet:image from ECR and makes sure that it can train: Python, torch, the GPUs, EFA, what the command imports.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

image=${GPUFLEET_IMAGE:-}
if [[ -z $image ]]; then
  log "no image: training runs in the node's own environment"
  exit 0
fi
load_runtime_env

unfit() {
  end_run "$image $*; build and push another one: pulumi config set gpufleet:image URI@DIGEST && pulumi up"
}

# log_in: have docker take ECR's password, which is valid for 12 hours, through a pipe:
# https://docs.aws.amazon.com/AmazonECR/latest/userguide/registry_auth.html
log_in() {
  aws ecr get-login-password --region "$GPUFLEET_REGION" |
    docker login --username AWS --password-stdin "${image%%/*}" >/dev/null
}

command -v docker >/dev/null || end_run "no docker on this image: a Deep Learning AMI brings it (gpufleet:amiId)"
systemctl start docker || die "docker does not start: journalctl -u docker"
if docker image inspect "$image" >/dev/null 2>&1; then
  log "$image is there"
else
  # docker writes the password into a file.
  DOCKER_CONFIG=$(mktemp --directory)
  export DOCKER_CONFIG
  trap 'rm -rf "$DOCKER_CONFIG"' EXIT
  retry 5 log_in || die "no access to ${image%%/*}: the node's role and the VPC's endpoints ecr.api and ecr.dkr must admit it"
  began=$SECONDS
  retry 3 docker pull --quiet "$image" >/dev/null || die "$image cannot be pulled; its layers come through the VPC's" \
    "endpoint for S3, and go to the root volume, which has $(df --output=avail --human-readable "$ROOT/" | tail -n 1) free"
  log "$image pulled in $((SECONDS - began)) s"
fi

# The modules that start the training: they take torchrun's inner parts, and Python 3.11.
answer=$(agent run-python -c "import bootstrap.training.torchrun; $TORCH_PROBE") ||
  unfit "cannot train: its python3 must be 3.11 or newer and import torch $TORCH_MIN; the error is above"
read -r torch nccl gpu <<<"$answer"
version_at_least "$torch" "$TORCH_MIN" || unfit "has torch $torch, at least $TORCH_MIN is needed"
modules=$(imported_modules)
[[ -z $modules ]] || agent run-python -c "import $modules" || unfit "lacks a module of $modules"
# Read to the end: grep --quiet would leave, and the lines of an unbuffered Python that follow would fail docker.
if ((${GPUFLEET_GPUDIRECT:-0})) && ! agent run-python "$BOOTSTRAP_DIR/agent" efa-settings | grep ^LD_LIBRARY_PATH= >/dev/null; then
  unfit "has no aws-ofi-nccl below /opt/amazon, so NCCL would not find EFA (AWS's Deep Learning Containers have it)"
fi
if ((GPUFLEET_EFA_CARDS)); then
  fault=$(agent run-python -c 'import os; p = "/opt/amazon/efa_installed_packages"; print(open(p).read() if os.path.exists(p) else "")' | efa_fault)
  [[ -z $fault ]] || unfit "cannot train: $fault"
fi
[[ $gpu == True ]] || die "torch $torch in $image sees no GPU: it is built without CUDA, or for a newer driver, or" \
  "nvidia-ctk has not configured docker"
log "$image has torch $torch with NCCL $nccl and sees the GPU"
