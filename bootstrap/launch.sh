#!/usr/bin/env bash
# Starts the training command on this node under torchrun, keeps it running, and leaves cleanly when the node is taken
# away: state saved, torchrun ended, Auto Scaling told to go on.
#
# Reads the variables below from the environment; gpufleet-train.service takes them from node.env and runtime.env. The
# unit's KillMode=mixed matters: SIGTERM must come here and not to torchrun, which would give the workers 30 s to save
# (torch 2.11 has no option for it).
set -euo pipefail

# shellcheck source=bootstrap/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# What to train: a script or "-m module", with its arguments; quotes are understood. Empty: nothing to do.
GPUFLEET_TRAIN_COMMAND="${GPUFLEET_TRAIN_COMMAND:-}"
GPUFLEET_NODE_COUNT="${GPUFLEET_NODE_COUNT:-1}"
GPUFLEET_GPUS_PER_NODE="${GPUFLEET_GPUS_PER_NODE:-1}"
GPUFLEET_EFA_CARDS="${GPUFLEET_EFA_CARDS:-0}"
GPUFLEET_REGION="${GPUFLEET_REGION:-}"
GPUFLEET_ASG_NAME="${GPUFLEET_ASG_NAME:-}"
GPUFLEET_TERMINATE_HOOK="${GPUFLEET_TERMINATE_HOOK:-}"
GPUFLEET_BUCKET="${GPUFLEET_BUCKET:-}"
GPUFLEET_CHECKPOINT_PREFIX="${GPUFLEET_CHECKPOINT_PREFIX:-checkpoints}"
# The training code's archive, named by its digest; empty where the image has the code.
GPUFLEET_TRAIN_ARCHIVE="${GPUFLEET_TRAIN_ARCHIVE:-}"
# Where EFA's software lies, before /opt.
OFI_ROOT="${ROOT:-}"
# Folder to start the command in.
GPUFLEET_TRAIN_DIR="${GPUFLEET_TRAIN_DIR:-$PWD}"
# The Python with torch that install-python-env.sh found or made.
GPUFLEET_PYTHON="${GPUFLEET_PYTHON:-python3}"
# Notes between this script and the workers; gone after a reboot, as they should be.
GPUFLEET_RUN_DIR="${GPUFLEET_RUN_DIR:-/run/gpufleet}"
# Worker restarts that one torchrun does itself, in seconds each; an interruption of another node uses one.
GPUFLEET_MAX_RESTARTS="${GPUFLEET_MAX_RESTARTS:-10}"
# A torchrun that failed is started again, unless this many in a row failed whose workers lived less than
# GPUFLEET_HEALTHY_S seconds each, torchrun's own restarts counted in.
GPUFLEET_MAX_LAUNCHES="${GPUFLEET_MAX_LAUNCHES:-5}"
GPUFLEET_HEALTHY_S="${GPUFLEET_HEALTHY_S:-300}"
GPUFLEET_RELAUNCH_DELAY_S="${GPUFLEET_RELAUNCH_DELAY_S:-5}"
# Seconds for the final checkpoint; torchrun then takes up to 30 s more, and systemd's TimeoutStopSec is 110.
GPUFLEET_DRAIN_LIMIT_S="${GPUFLEET_DRAIN_LIMIT_S:-75}"
# Seconds to wait until all nodes of the fleet are in service, and between two looks.
GPUFLEET_JOIN_LIMIT_S="${GPUFLEET_JOIN_LIMIT_S:-1800}"
GPUFLEET_JOIN_POLL_S="${GPUFLEET_JOIN_POLL_S:-10}"
GPUFLEET_RENDEZVOUS_PORT="${GPUFLEET_RENDEZVOUS_PORT:-29400}"

# EX_CONFIG (sysexits.h): the training command is at fault, and the unit does not start it again.
readonly GAVE_UP=78
readonly DRAIN_FILE="$GPUFLEET_RUN_DIR/drain"
readonly SAVED_FILE="$GPUFLEET_RUN_DIR/drain.saved"
# Measured with torch 2.11 after kill -9: torchrun's default hung in 11 of 19 restarts, with its own store process 0 of
# 10; shrinking two nodes to one took 42.8 s by default and 6.7 to 7.5 s with these intervals.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
readonly RENDEZVOUS_CONF="last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

torchrun_pid=""

# The unit's stderr is the journal already, so lib.sh's copy to the logger would be a second one.
log() {
  printf '%s launch: %s\n' "$(date -u +%FT%TZ)" "$*" >&2
}

# my_instance_id: from the metadata service (lib.sh), at the endpoint the AWS SDKs use.
my_instance_id() {
  IMDS_URL="${AWS_EC2_METADATA_SERVICE_ENDPOINT:-$IMDS_URL}"
  imds instance-id
}

aws_cli() {
  aws --region "$GPUFLEET_REGION" --output text "$@"
}

# in_service_instances: "launch-time instance-id private-ip" of each running in-service node of the fleet, oldest first.
in_service_instances() {
  local ids
  ids="$(aws_cli autoscaling describe-auto-scaling-groups --auto-scaling-group-names "$GPUFLEET_ASG_NAME" \
    --query "AutoScalingGroups[0].Instances[?LifecycleState=='InService'].InstanceId")" || return 1
  if [[ -z "$ids" || "$ids" == None ]]; then
    return 0
  fi
  # A node that was just interrupted may still be in service for Auto Scaling; EC2 knows better.
  # shellcheck disable=SC2086 # one argument an id
  aws_cli ec2 describe-instances --instance-ids $ids \
    --query "Reservations[].Instances[] | [?State.Name=='running'].[LaunchTime,InstanceId,PrivateIpAddress]" | sort
}

# Every node must pick the same rendezvous host on its own. The oldest node it is (the lower id of equals): a replacement
# is always younger, so it joins where the survivors wait. The lowest id alone would let a newcomer found a second group.
resolve_rendezvous() {
  local instance_id instances count first_id first_ip deadline=$((SECONDS + GPUFLEET_JOIN_LIMIT_S))
  instance_id=$(my_instance_id) || exit 1
  while true; do
    if instances="$(in_service_instances)"; then
      count="$(grep -c . <<<"$instances" || true)"
      if ((count >= GPUFLEET_NODE_COUNT)); then
        read -r _ first_id first_ip _ <<<"$instances"
        is_host=0
        [[ "$first_id" == "$instance_id" ]] && is_host=1
        rendezvous_ip="$first_ip"
        return 0
      fi
      log "$count of $GPUFLEET_NODE_COUNT nodes of $GPUFLEET_ASG_NAME are in service; waiting for the rest"
    else
      log "cannot list the nodes of $GPUFLEET_ASG_NAME; trying again"
    fi
    if [[ -e "$DRAIN_FILE" ]]; then
      return 0
    fi
    ((SECONDS < deadline)) || die "the fleet was not complete within $GPUFLEET_JOIN_LIMIT_S s"
    pause "$GPUFLEET_JOIN_POLL_S"
  done
}

# pause SECONDS: a sleep that a trapped signal interrupts.
pause() {
  sleep "$1" &
  wait $! || true
}

# What the plan says of parallelism; torchrun's workers inherit it, and the training command acts on it.
readonly PARALLELISM=(
  GPUFLEET_DATA_PARALLEL GPUFLEET_SHARDING GPUFLEET_TENSOR_PARALLEL GPUFLEET_PIPELINE_PARALLEL
  GPUFLEET_CONTEXT_PARALLEL GPUFLEET_EXPERT_PARALLEL GPUFLEET_SEQUENCE_PARALLEL GPUFLEET_VIRTUAL_STAGES
  GPUFLEET_MICRO_BATCH GPUFLEET_GRAD_ACCUM GPUFLEET_ACTIVATION_CHECKPOINTING
)

# version: of what this node trains, and how. Nodes of two versions never meet at the rendezvous: one of them would
# compute something else in the same job, in silence.
version() {
  local name layout=""
  for name in "${PARALLELISM[@]}"; do
    layout+="${!name:+ $name=${!name}}"
  done
  sha256sum <<<"$GPUFLEET_TRAIN_ARCHIVE $GPUFLEET_TRAIN_COMMAND$layout" | cut -c 1-12
}

start_torchrun() {
  local -a arguments=(
    --nproc-per-node "$GPUFLEET_GPUS_PER_NODE" --max-restarts "$GPUFLEET_MAX_RESTARTS" --rdzv-conf "$RENDEZVOUS_CONF"
  )
  if ((GPUFLEET_NODE_COUNT > 1)); then
    arguments[5]+=",is_host=$is_host"
    arguments+=(--nnodes "$GPUFLEET_NODE_COUNT" --rdzv-backend c10d --rdzv-id "$GPUFLEET_ASG_NAME-$(version)"
    --rdzv-endpoint "$rendezvous_ip:$GPUFLEET_RENDEZVOUS_PORT")
  else
    arguments+=(--standalone --nnodes 1)
  fi
  # The command itself is not logged: it may hold a token.
  log "starting torchrun ${arguments[*]}"
  "$GPUFLEET_PYTHON" -m torch.distributed.run "${arguments[@]}" "${train_command[@]}" &
  torchrun_pid=$!
}

# Waits for torchrun; ends it when this node is leaving and its state is saved, or the limit for that is over.
supervise() {
  local drain_deadline="" status=0 told=""
  while kill -0 "$torchrun_pid" 2>/dev/null; do
    if [[ -e "$DRAIN_FILE" && -z "$drain_deadline" ]]; then
      drain_deadline=$((SECONDS + GPUFLEET_DRAIN_LIMIT_S))
      log "leaving: $(<"$DRAIN_FILE")"
    fi
    if [[ -z "$told" && -e "$SAVED_FILE" ]]; then
      log "state is saved; ending torchrun"
      kill -TERM "$torchrun_pid" 2>/dev/null || true
      told=1
    elif [[ -z "$told" && -n "$drain_deadline" ]] && ((SECONDS >= drain_deadline)); then
      log "state is NOT saved within $GPUFLEET_DRAIN_LIMIT_S s; ending torchrun"
      kill -TERM "$torchrun_pid" 2>/dev/null || true
      told=1
    fi
    pause 0.5
  done
  wait "$torchrun_pid" || status=$?
  torchrun_pid=""
  return "$status"
}

request_drain() {
  # A second signal changes nothing: the limit runs already.
  [[ -e "$DRAIN_FILE" ]] || printf 'launch.sh got SIG%s\n' "$1" >"$DRAIN_FILE"
}

complete_terminate_hook() {
  local instance_id
  if [[ -z "$GPUFLEET_TERMINATE_HOOK" || -z "$GPUFLEET_ASG_NAME" ]]; then
    return 0
  fi
  instance_id=$(my_instance_id) || return 0
  if aws_cli autoscaling complete-lifecycle-action --auto-scaling-group-name "$GPUFLEET_ASG_NAME" \
    --lifecycle-hook-name "$GPUFLEET_TERMINATE_HOOK" --instance-id "$instance_id" \
    --lifecycle-action-result CONTINUE >/dev/null; then
    log "terminate hook $GPUFLEET_TERMINATE_HOOK completed"
  else
    # A spot interruption or a plain stop of the service has no hook that waits.
    log "terminate hook $GPUFLEET_TERMINATE_HOOK not completed; its timeout will"
  fi
}

check_settings() {
  local name
  for name in GPUFLEET_NODE_COUNT GPUFLEET_GPUS_PER_NODE; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die "$name is '${!name}'; expected a count of at least 1 in $NODE_ENV"
  done
  if ! xargs printf '' <<<"$GPUFLEET_TRAIN_COMMAND" 2>/dev/null; then
    die "GPUFLEET_TRAIN_COMMAND in $NODE_ENV has unbalanced quotes"
  fi
  mapfile -d '' -t train_command < <(xargs printf '%s\0' <<<"$GPUFLEET_TRAIN_COMMAND")
  command -v "$GPUFLEET_PYTHON" >/dev/null ||
    die "GPUFLEET_PYTHON is $GPUFLEET_PYTHON, and there is no such program; steps/install-python-env.sh writes it"
  if ((GPUFLEET_NODE_COUNT > 1)) && [[ -z "$GPUFLEET_ASG_NAME" || -z "$GPUFLEET_REGION" ]]; then
    die "GPUFLEET_NODE_COUNT is $GPUFLEET_NODE_COUNT, so GPUFLEET_ASG_NAME and GPUFLEET_REGION must say where the others are"
  fi
}

export_settings() {
  export PYTHONPATH="${BOOTSTRAP_DIR%/*}${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONUNBUFFERED=1
  # The plan's "it fits" counts on it: without it, blocks of odd sizes strand a part of the memory
  # (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
  export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
  export GPUFLEET_DRAIN_FILE="$DRAIN_FILE" GPUFLEET_REGION
  # Set by the service already; a node.env that was sourced without export must not lose them.
  local name
  for name in "${PARALLELISM[@]}"; do
    [[ -z "${!name:-}" ]] || export "${name?}"
  done
  # For the training code's own calls to AWS.
  if [[ -n "$GPUFLEET_REGION" ]]; then
    export AWS_DEFAULT_REGION="${AWS_DEFAULT_REGION:-$GPUFLEET_REGION}"
  fi
  if [[ -n "$GPUFLEET_BUCKET" ]]; then
    export GPUFLEET_CHECKPOINT_URI="${GPUFLEET_CHECKPOINT_URI:-s3://$GPUFLEET_BUCKET/$GPUFLEET_CHECKPOINT_PREFIX}"
  fi
  if ((GPUFLEET_EFA_CARDS > 0)); then
    # Without it libfabric may choose TCP where EFA does not come up, and nothing but the bill would tell.
    export FI_PROVIDER=efa
    # NCCL loads its EFA plugin by name, and a service has no loader path of its own: not found, NCCL takes TCP.
    local plugin
    plugin="$(find "$OFI_ROOT/opt/amazon" "$OFI_ROOT/opt/aws-ofi-nccl" -name 'libnccl-net*.so*' 2>/dev/null | head -n 1)" || true
    if [[ -n "$plugin" ]]; then
      export LD_LIBRARY_PATH="${plugin%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
  fi
}

main() {
  local launches=0 status started
  if [[ -z "${GPUFLEET_TRAIN_COMMAND//[[:space:]]/}" ]]; then
    log "nothing to train: GPUFLEET_TRAIN_COMMAND is empty in $NODE_ENV"
    return 0
  fi
  check_settings
  export_settings
  mkdir -p "$GPUFLEET_RUN_DIR"
  rm -f "$DRAIN_FILE" "$SAVED_FILE"
  cd -- "$GPUFLEET_TRAIN_DIR"
  trap 'request_drain TERM' TERM
  trap 'request_drain INT' INT

  while true; do
    is_host=1 rendezvous_ip=127.0.0.1
    if ((GPUFLEET_NODE_COUNT > 1)); then
      resolve_rendezvous
    fi
    status=0
    started=$SECONDS
    if [[ ! -e "$DRAIN_FILE" ]]; then
      start_torchrun
      supervise || status=$?
    fi
    if [[ -e "$DRAIN_FILE" ]]; then
      complete_terminate_hook
      log "this node has left the run"
      return 0
    fi
    if ((status == 0)); then
      log "training is complete"
      return 0
    fi
    ((SECONDS - started >= GPUFLEET_HEALTHY_S * (GPUFLEET_MAX_RESTARTS + 1))) && launches=0
    launches=$((launches + 1))
    if ((launches >= GPUFLEET_MAX_LAUNCHES)); then
      log "torchrun failed $launches times in a row within $GPUFLEET_HEALTHY_S s a start, the last with status $status;" \
        "giving up. This node is paid until it is destroyed; its log: journalctl -u gpufleet-train"
      return "$GAVE_UP"
    fi
    log "torchrun ended with status $status after $((SECONDS - started)) s; starting it again"
    pause "$GPUFLEET_RELAUNCH_DELAY_S"
  done
}

main "$@"
