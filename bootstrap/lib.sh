# shellcheck shell=bash disable=SC2034 # the scripts that source this use the variables
# Strict mode, settings and functions of all steps and checks. Sourced, never run.
set -euo pipefail

BOOTSTRAP_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$BOOTSTRAP_DIR/versions.sh"

# Settings with their defaults.
: "${ROOT:=}"                    # prefix of every system path; empty on a node, a folder in tests
: "${NODE_INIT_TIMEOUT_S:=1800}" # set-up but the copy of data, s; then the node is replaced
: "${HOOK_HEARTBEAT_S:=60}"      # between heartbeats of a lifecycle hook, s (agent/settings.py)
: "${LEAVE_LIMIT_S:=180}"        # wait of an abandoned node for its group, s; then the node ends itself
: "${RETRY_DELAY_S:=5}"          # between attempts of retry, s
: "${APT_LOCK_TIMEOUT_S:=300}"   # wait for unattended-upgrades to release apt, s
: "${IMDS_URL:=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}}"
: "${NVME_MOUNT:=$ROOT/mnt/nvme}"           # mount of the instance-store disks
: "${LUSTRE_MOUNT:=$ROOT/mnt/lustre}"       # mount of the training data's Lustre file system
: "${DISK_MIN_FREE_GIB:=20}"                # least free space on the root volume: a torch environment and logs
: "${PCIE_MIN_WIDTH:=8}"                    # least lanes of a GPU; some GPU types of EC2 have 8
: "${GPU_ANSWER_LIMIT_S:=60}"               # nvidia-smi's answer while training, s
: "${TIME_SYNC_TIMEOUT_S:=60}"              # wait for chrony's first synchronisation, s
: "${SMOKE_TIMEOUT_S:=600}"                 # limit of the smoke test, s
: "${GPUFLEET_RUN_DIR:=$ROOT/run/gpufleet}" # files between the node's processes; gone after a reboot
: "${WHEELS_KEY:=bootstrap/wheels.tar}"     # object of the stack's bucket with the wheels of requirements-node.txt

ETC_DIR=$ROOT/etc/gpufleet
LOG_DIR=$ROOT/var/log/gpufleet
STATE_DIR=$ROOT/var/lib/gpufleet
NODE_ENV=$ETC_DIR/node.env
RUNTIME_ENV=$ETC_DIR/runtime.env
LOG_FILE=$LOG_DIR/node-init.log
LAUNCH_HOOK=gpufleet-launch        # of every group (infra/naming.py)
DRAIN_FILE=$GPUFLEET_RUN_DIR/drain # format: bootstrap/training/notices.py
TRAIN_LOG=$LOG_DIR/train.log       # of gpufleet-train.service; the CloudWatch agent sends it

# User data writes node.env in the syntax of shells, and systemd reads it too (bootstrap/contract/node_env.py).
if [[ -r $NODE_ENV ]]; then
  set -a
  # shellcheck disable=SC1090
  source "$NODE_ENV"
  set +a
fi

# A system service's PATH lacks the programs of the EFA installer and CUDA.
PATH=$PATH:$ROOT/opt/amazon/efa/bin:$ROOT/usr/local/cuda/bin

# The AWS CLI's own retries, for throttling while a whole fleet starts.
export AWS_RETRY_MODE=standard AWS_MAX_ATTEMPTS=5 AWS_PAGER=""
# The CLI's default is one question to the metadata service, for one second (agent/commands.py).
export AWS_METADATA_SERVICE_TIMEOUT=5 AWS_METADATA_SERVICE_NUM_ATTEMPTS=3
export DEBIAN_FRONTEND=noninteractive

# log MESSAGE...: write a line to stderr, the journal, and the file LOG_COPY if set.
log() {
  local line
  line="$(date -u +%Y-%m-%dT%H:%M:%SZ) $(basename "$0"): $*"
  printf '%s\n' "$line" >&2
  if [[ -n ${LOG_COPY:-} ]]; then printf '%s\n' "$line" >>"$LOG_COPY"; fi
  if command -v logger >/dev/null; then logger --tag gpufleet-init -- "$line" || true; fi
}

die() {
  log "FAIL $*"
  exit 1
}

# end_run MESSAGE...: exit with the status that ends the run: every other node would fail alike.
end_run() {
  log "FAIL $*"
  exit 78
}

# retry ATTEMPTS COMMAND...: for fetches over a network that is coming up.
retry() {
  local attempts=$1 attempt
  shift
  for ((attempt = 1; attempt <= attempts; attempt++)); do
    if "$@"; then return 0; fi
    log "attempt $attempt of $attempts failed: $1"
    if ((attempt < attempts)); then sleep "$RETRY_DELAY_S"; fi
  done
  return 1
}

# set_runtime NAME VALUE: write a line of runtime.env for gpufleet-train.service.
set_runtime() {
  local kept=""
  if [[ -f $RUNTIME_ENV ]]; then kept=$(grep -v "^$1=" "$RUNTIME_ENV" || true); fi
  mkdir -p "$ETC_DIR"
  printf '%s\n' ${kept:+"$kept"} "$1=$2" >"$RUNTIME_ENV.new"
  mv "$RUNTIME_ENV.new" "$RUNTIME_ENV"
}

# load_runtime_env: export what earlier steps found.
load_runtime_env() {
  local name value
  while IFS='=' read -r name value; do export "$name=$value"; done < <(cat "$RUNTIME_ENV" 2>/dev/null || true)
}

# Prints the versions of torch and its NCCL, and whether torch sees a GPU.
TORCH_PROBE='import torch; print(torch.__version__.split("+")[0], ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.is_available())'

# imported_modules: print what the training command imports beside torch, as far as that is known: the reference
# trainer's libraries, with boto3 for its checkpoints in S3.
imported_modules() {
  if [[ ${GPUFLEET_TRAIN_COMMAND:-} == "-m bootstrap.trainer" ]]; then echo "boto3, transformers, torchvision"; fi
}

# version_at_least VERSION MINIMUM: compare by version order, so 1.9 is below 1.41.
version_at_least() {
  printf '%s\n%s\n' "$2" "$1" | sort --version-sort --check=quiet
}

# efa_fault: read EFA's list of installed packages, and print why a gang cannot train with them (known-bad.csv); nothing
# where it can, or for a node that trains alone. Lines of the list: "# EFA installer version: 1.50.0", and packages like
# libnccl-ofi_1.21.1-1_amd64.
efa_fault() {
  local list software first fixed harm source version
  list=$(cat)
  if ((GPUFLEET_NODE_COUNT < 2)); then return; fi
  while IFS=, read -r software first fixed harm source _; do
    case $software in
      aws-ofi-nccl) version='.*libnccl-ofi[^0-9]*' ;;
      efa-installer) version='.*EFA installer version: ' ;;
      *) continue ;;
    esac
    version=$(sed --silent "s/$version\([0-9.]*[0-9]\).*/\1/p" <<<"$list" | head -n 1)
    if [[ -n $version ]] && version_at_least "$version" "$first" && ! version_at_least "$version" "$fixed"; then
      echo "$software is $version: $harm, and $fixed is the first without that fault ($source)"
      return
    fi
  done <"$BOOTSTRAP_DIR/known-bad.csv"
}

os_release() {
  sed --silent "s/^$1=\"\{0,1\}\([^\"]*\)\"\{0,1\}$/\1/p" "$ROOT/etc/os-release"
}

# query_gpus FIELD,...: print one CSV line a GPU, or exit.
query_gpus() {
  nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits || die "nvidia-smi cannot answer $1"
}

# assert_may_install NAME VERSION MINIMUM: exit on a Deep Learning AMI, which should have brought the software.
assert_may_install() {
  [[ ${GPUFLEET_AMI_KIND:-} == custom ]] && return 0
  end_run "$1 is ${2:-absent}, at least $3 is needed, and a Deep Learning AMI brings it: choose a newer image" \
    "(gpufleet:amiName), or one of your own (gpufleet:amiId) in subnets that reach the internet"
}

# skip_where_training_needs_none NAME VERSION MINIMUM: warn and exit well on a Deep Learning AMI, as the training
# environment brings its own; only an image of one's own gets it installed.
skip_where_training_needs_none() {
  [[ ${GPUFLEET_AMI_KIND:-} == custom ]] && return 0
  log "WARN $1 is ${2:-absent} on this image, at least $3 is tested: training uses that of torch's environment"
  exit 0
}

# Xid errors after which NVIDIA asks for a reset of the GPU or a restart of the machine; 154 is the driver's own summary
# of the needed action: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (read 2026-11-21).
FATAL_XIDS='46|48|62|64|74|79|95|109|110|119|120|136|140|143|158'
NEEDED_ACTIONS='GPU Reset Required|Node Reboot Required'

# fatal_xid_error: print the first kernel message of a fatal Xid error; nothing where there is none or dmesg fails.
fatal_xid_error() {
  { dmesg 2>/dev/null || true; } |
    grep -m 1 -E "NVRM: Xid \([^)]*\): (($FATAL_XIDS),|154,.* to [^ ]+ \\(($NEEDED_ACTIONS)\\))" || true
}

# apt_install PACKAGE=VERSION...: install and hold exactly these versions.
apt_install() {
  retry 3 apt-get -o DPkg::Lock::Timeout="$APT_LOCK_TIMEOUT_S" install --yes --no-install-recommends \
    --allow-downgrades --allow-change-held-packages "$@" || die "apt-get could not install $*"
  apt-mark hold "${@%%=*}" >/dev/null
}

# apt_update: DPkg::Lock::Timeout is of dpkg's lock alone; for that of the lists, which apt-daily holds at the first boot,
# apt-get update does not wait: https://salsa.debian.org/apt-team/apt/-/blob/2.6.1/apt-pkg/acquire.cc
apt_update() {
  mkdir -p "$ROOT/var/lib/apt/lists"
  timeout "$APT_LOCK_TIMEOUT_S" python3 -c 'import fcntl, sys; fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX)' \
    "$ROOT/var/lib/apt/lists/lock" || log "apt's lists are still locked"
  retry 3 apt-get update --quiet || die "apt-get update failed"
}

download() {
  retry 3 curl --fail --silent --show-error --location --proto '=https' --tlsv1.2 --connect-timeout 10 \
    --max-time 300 --output "$2" "$1" || die "cannot fetch $1: private subnets have no way to the internet"
}

# assert_sha256 FILE SUM: exit unless the file has this digest.
assert_sha256() {
  printf '%s  %s\n' "$2" "$1" | sha256sum --check --status || die "$1 does not have SHA-256 $2: not installing it"
}

# import_key KEY_FILE FINGERPRINT KEYRING_DIR: exit unless the file holds exactly this key.
import_key() {
  local fingerprints
  mkdir --mode 0700 "$3"
  gpg --homedir "$3" --batch --quiet --import "$1" || die "$1 is not a key"
  fingerprints=$(gpg --homedir "$3" --batch --with-colons --fingerprint |
    awk -F: '$1 == "pub" { primary = 1 } $1 == "fpr" && primary { print $10; primary = 0 }')
  [[ $fingerprints == "$2" ]] || die "$1 has key ${fingerprints:-none}, expected $2: not trusting it"
}

# in_order FOLDER: print the names of the scripts with a line "# Order: N", by N; fails where there are none.
in_order() {
  grep --max-count=1 '^# Order: ' "$BOOTSTRAP_DIR/$1"/*.sh | sed 's|^.*/\(.*\)\.sh:# Order:|\1|' |
    sort --key=2 --numeric-sort | sed 's/ .*//'
}

# imds PATH: print a value of the instance metadata service, version 2 only. It may answer 503, or late, for a moment:
# https://github.com/canonical/cloud-init/issues/5577, https://github.com/aws/aws-parallelcluster-cookbook/pull/3266
imds() {
  local token asked=(curl --fail --silent --max-time 5 --retry 3 --retry-connrefused)
  token=$("${asked[@]}" --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
    "$IMDS_URL/latest/api/token") || die "no token from the instance metadata service"
  # The header goes through stdin: the process list would show an argument.
  printf 'X-aws-ec2-metadata-token: %s' "$token" |
    "${asked[@]}" --header @- "$IMDS_URL/latest/meta-data/$1" ||
    die "the instance metadata service does not answer $1"
}

drain_reason() {
  local reason=""
  read -r _ reason <"$DRAIN_FILE" || true
  printf '%s' "$reason"
}

# agent [COMMAND [ARGUMENT...]]: run a command of agent/ (--help lists them).
agent() {
  python3 "$BOOTSTRAP_DIR/agent" "$@"
}
