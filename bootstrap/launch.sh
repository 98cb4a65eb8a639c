#!/usr/bin/env bash
# Runs the training command on this node under torchrun, and leaves in order when the node ends: state saved, torchrun
# ended, terminate hook completed. Without a command, or after its end, it stays until the group ends the node, so that
# no node waits out a hook.
#
# gpufleet-train.service gives it the variables of node.env and runtime.env. The unit's KillMode=mixed sends SIGTERM to
# this script and not to torchrun, which would give the workers only 30 s to save (torch 2.11 has no option for it).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$BOOTSTRAP_DIR/fleet.sh"

# Variables of node.env and runtime.env (contract/node_env.py); without a group launch.sh ends with the training.
: "${GPUFLEET_TRAIN_COMMAND:=}" "${GPUFLEET_TRAIN_ARCHIVE:=}" "${GPUFLEET_TRAIN_DIR:=$PWD}" "${GPUFLEET_PYTHON:=python3}"
: "${GPUFLEET_MODE:=training}" "${GPUFLEET_RUN:=}" "${GPUFLEET_NODE_COUNT:=1}" "${GPUFLEET_GPUS_PER_NODE:=1}"
: "${GPUFLEET_GPUDIRECT:=0}" "${GPUFLEET_REGION:=}" "${GPUFLEET_ASG_NAME:=}" "${GPUFLEET_TERMINATE_HOOK:=}"
: "${GPUFLEET_LOG_GROUP:=}" "${GPUFLEET_BUCKET:=}" "${GPUFLEET_CHECKPOINT_PREFIX:=checkpoints}"

# Restarts of the workers by one torchrun, which take seconds; an interruption of another node uses one.
: "${GPUFLEET_MAX_RESTARTS:=10}"
# A failed torchrun is started again, unless this many in a row failed whose workers, torchrun's own restarts counted
# in, lived less than GPUFLEET_HEALTHY_S seconds each.
: "${GPUFLEET_MAX_LAUNCHES:=5}"
: "${GPUFLEET_HEALTHY_S:=300}"
: "${GPUFLEET_RELAUNCH_DELAY_S:=5}"
: "${GPUFLEET_WORKER_PAUSE_S:=60}" # between two runs of a worker's command, s; the group may end the node in it
# torchrun gives its workers 30 s after SIGTERM, and is killed after this time. With the 75 s for saving
# (training/notices.py) it is below the unit's TimeoutStopSec and a spot notice's two minutes.
: "${GPUFLEET_KILL_AFTER_S:=32}"
: "${GPUFLEET_JOIN_LIMIT_S:=1800}" # until all nodes of the fleet are in service, s
: "${GPUFLEET_JOIN_POLL_S:=10}"
: "${GPUFLEET_RENDEZVOUS_PORT:=29400}"
: "${GPUFLEET_PEERS:=}"        # in a pod, without a group to ask: host names of the peers, with %d for the rank
: "${GPUFLEET_NODE_RANK:=0}"   # this pod's rank
: "${GPUFLEET_LEFT_STATUS:=0}" # of a node that left the run; Kubernetes would count a pod with 0 as done
: "${GPUFLEET_GPU_CHECK_S:=60}"
: "${GPUFLEET_TELL_DELAY_S:=30}" # between two attempts to report to the controller, s

# EX_CONFIG (sysexits.h): the training command is at fault; the unit does not restart it.
readonly GAVE_UP=78
readonly SAVED_FILE="$DRAIN_FILE.saved" LISTENER_FILE="$DRAIN_FILE.listener"
readonly STATE_FILE="$GPUFLEET_RUN_DIR/state" TOLD_FILE="$GPUFLEET_RUN_DIR/state.told"
# Measured with torch 2.11 after kill -9: torchrun's default hung in 11 of 19 restarts, with its own store process in 0
# of 10; shrinking two nodes to one took 42.8 s by default, 6.7 to 7.5 s with these intervals.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
readonly RENDEZVOUS_CONF="last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"

torchrun_pid="" watcher_pid="" teller_pid="" watch_again_at=0

# The unit's stderr is the journal, so lib.sh's copy to the logger would double each line.
log() {
  printf '%s launch: %s\n' "$(date -u +%FT%TZ)" "$*" >&2
}

# pause SECONDS: sleep until a trapped signal.
pause() {
  sleep "$1" &
  wait $! || true
}

in_fleet() {
  [[ -n "$GPUFLEET_ASG_NAME" ]]
}

keep_watching() {
  # In a pod the metadata service does not answer; the node writes the drain file.
  [[ "${AWS_EC2_METADATA_DISABLED:-}" != true ]] || return 0
  if [[ -n "$watcher_pid" ]] && kill -0 "$watcher_pid" 2>/dev/null; then return 0; fi
  # Not twice a second where it cannot run.
  ((SECONDS >= watch_again_at)) || return 0
  watch_again_at=$((SECONDS + 5))
  watch_notices &
  watcher_pid=$!
}

# ask_drain REASON: write the drain file; the watcher sets the time limit.
ask_drain() {
  # Without Python nothing trains, so there is nothing to save.
  (watch_notices --ask "$1") || printf '%s %s\n' "$EPOCHSECONDS" "$1" >"$DRAIN_FILE"
}

# tell STATE EXIT_STATUS [STEP]: report to the controller in the background, until that succeeded.
tell() {
  printf '%s\n' "$*" >"$STATE_FILE"
  keep_telling
}

# keep_telling: one process at a time, so that no older state overwrites a newer one.
keep_telling() {
  if [[ -n "$teller_pid" ]] && kill -0 "$teller_pid" 2>/dev/null; then return 0; fi
  [[ -e "$STATE_FILE" && "$(<"$STATE_FILE")" != "$(cat "$TOLD_FILE" 2>/dev/null)" ]] || return 0
  tell_newest &
  teller_pid=$!
}

tell_newest() {
  local -a state
  while true; do
    read -ra state <"$STATE_FILE"
    if tell_controller "${state[@]}"; then break; fi
    log "the controller could not be told that this node is ${state[0]}; trying again in $GPUFLEET_TELL_DELAY_S s"
    sleep "$GPUFLEET_TELL_DELAY_S"
  done
  printf '%s\n' "${state[*]}" >"$TOLD_FILE"
  log "the controller knows that this node is ${state[0]}"
}

# wait_for_others NOUN DEADLINE: pause until the next poll; fails where a notice ends this node.
wait_for_others() {
  if [[ -e "$DRAIN_FILE" ]]; then return 1; fi
  ((SECONDS < $2)) || die "the $1 was not complete within $GPUFLEET_JOIN_LIMIT_S s"
  keep_watching
  pause "$GPUFLEET_JOIN_POLL_S"
}

# in_service_instances: print "launch-time instance-id private-ip" of the fleet's running nodes in service, oldest
# first.
in_service_instances() {
  local ids
  ids="$(aws_cli autoscaling describe-auto-scaling-groups --auto-scaling-group-names "$GPUFLEET_ASG_NAME" \
    --query "AutoScalingGroups[0].Instances[?LifecycleState=='InService'].InstanceId")" || return 1
  if [[ -z "$ids" || "$ids" == None ]]; then
    return 0
  fi
  # Auto Scaling may still show a node in service that EC2 just interrupted.
  # shellcheck disable=SC2086 # one argument an id
  aws_cli ec2 describe-instances --instance-ids $ids \
    --query "Reservations[].Instances[] | [?State.Name=='running'].[LaunchTime,InstanceId,PrivateIpAddress]" | sort
}

# resolve_rendezvous: every node picks the same host by itself: the oldest node (of equals the lower id). A replacement
# is always younger, so it joins where the survivors wait; by the id alone, a replacement could found a second group.
resolve_rendezvous() {
  local instances count first_id deadline=$((SECONDS + GPUFLEET_JOIN_LIMIT_S))
  know_instance_id || exit 1
  while true; do
    if instances="$(in_service_instances)"; then
      count="$(grep -c . <<<"$instances" || true)"
      own_ip="$(awk -v id="$INSTANCE_ID" '$2 == id { print $3 }' <<<"$instances")"
      if ((count >= GPUFLEET_NODE_COUNT)) && [[ -n "$own_ip" ]]; then
        read -r _ first_id rendezvous_ip _ <<<"$instances"
        is_host=0
        [[ "$first_id" == "$INSTANCE_ID" ]] && is_host=1
        return 0
      fi
      log "$count of $GPUFLEET_NODE_COUNT nodes of $GPUFLEET_ASG_NAME are in service; waiting for the rest"
    else
      log "cannot list the nodes of $GPUFLEET_ASG_NAME; trying again"
    fi
    wait_for_others fleet "$deadline" || return 0
  done
}

# resolve_peers: the same in a pod. A running pod has an address, and rank 0 is the host. The others wait until it
# listens: the name of a pod whose node died stays for minutes, and a torchrun without its host would count as failed.
resolve_peers() {
  local rank name address count deadline=$((SECONDS + GPUFLEET_JOIN_LIMIT_S))
  while true; do
    count=0
    for ((rank = 0; rank < GPUFLEET_NODE_COUNT; rank++)); do
      # shellcheck disable=SC2059 # %d in the pattern is the rank
      name="$(printf "$GPUFLEET_PEERS" "$rank")"
      address="$(getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')" || true
      if [[ -n "$address" ]]; then
        count=$((count + 1))
        ((rank != 0)) || rendezvous_ip="$address"
        ((rank != GPUFLEET_NODE_RANK)) || own_ip="$address"
      fi
    done
    if ((count < GPUFLEET_NODE_COUNT)); then
      log "$count of $GPUFLEET_NODE_COUNT pods have an address; waiting for the rest"
    elif ((GPUFLEET_NODE_RANK == 0)); then
      is_host=1
      return 0
    elif timeout 5 bash -c ": <>/dev/tcp/$rendezvous_ip/$GPUFLEET_RENDEZVOUS_PORT" 2>/dev/null; then
      is_host=0
      return 0
    else
      log "the first pod does not listen yet; waiting for it"
    fi
    wait_for_others gang "$deadline" || return 0
  done
}

# The plan's job and layout; torchrun's workers inherit them, and the training command follows them.
readonly PLANNED=(
  GPUFLEET_ARCHITECTURE GPUFLEET_PRECISION GPUFLEET_OPTIMIZER GPUFLEET_COMPILED GPUFLEET_GLOBAL_BATCH GPUFLEET_STEPS
  GPUFLEET_TRAIN_DATA GPUFLEET_BASE_WEIGHTS
  GPUFLEET_METHOD GPUFLEET_LORA_RANK GPUFLEET_LORA_ALPHA GPUFLEET_LORA_TARGETS GPUFLEET_FROZEN
  GPUFLEET_DATA_PARALLEL GPUFLEET_SHARDING GPUFLEET_TENSOR_PARALLEL GPUFLEET_PIPELINE_PARALLEL
  GPUFLEET_CONTEXT_PARALLEL GPUFLEET_EXPERT_PARALLEL GPUFLEET_SEQUENCE_PARALLEL GPUFLEET_VIRTUAL_STAGES
  GPUFLEET_MICRO_BATCH GPUFLEET_GRAD_ACCUM GPUFLEET_ACTIVATION_CHECKPOINTING GPUFLEET_GRADIENT_COMPRESSION
  GPUFLEET_SHARES
)

# version: print a digest of code, command, job and layout. Nodes of two versions never meet at the rendezvous, where they
# would silently compute different things in one job.
version() {
  local name layout=""
  for name in "${PLANNED[@]}"; do
    layout+="${!name:+ $name=${!name}}"
  done
  sha256sum <<<"$GPUFLEET_TRAIN_ARCHIVE $GPUFLEET_TRAIN_COMMAND$layout" | cut -c 1-12
}

is_gang() {
  [[ "$GPUFLEET_MODE" == training ]] && ((GPUFLEET_NODE_COUNT > 1))
}

# export_interfaces: keep NCCL's bootstrap and gloo off the bridges of containers, which no other node reaches.
export_interfaces() {
  local interface
  # NCCL leaves out docker and lo by itself, and hangs on a veth (https://github.com/NVIDIA/nccl/issues/913). Exclusions,
  # as names differ: ens6, enp40s0 (https://github.com/aws/deep-learning-containers/pull/6469).
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^docker,lo,veth}"
  # Gloo takes names only, and by default the address of the host's own name, which may be docker0's:
  # https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
  if [[ -z "${GLOO_SOCKET_IFNAME:-}" ]]; then
    interface="$(ip -oneline -4 address show to "$own_ip/32" 2>/dev/null | awk 'NR == 1 { print $2 }')" || true
    [[ -z "$interface" ]] || export GLOO_SOCKET_IFNAME="$interface"
  fi
}

start_torchrun() {
  local -a arguments=(
    --nproc-per-node "$GPUFLEET_GPUS_PER_NODE" --max-restarts "$GPUFLEET_MAX_RESTARTS" --rdzv-conf "$RENDEZVOUS_CONF"
  )
  if is_gang; then
    export_interfaces
    arguments[5]+=",is_host=$is_host"
    # The address, not the name: all ranks connect to the first rank, and a VPC may have no DNS for its name.
    arguments+=(--nnodes "$GPUFLEET_NODE_COUNT" --rdzv-backend c10d --rdzv-id "${GPUFLEET_ASG_NAME:-pods}-$(version)"
    --rdzv-endpoint "$rendezvous_ip:$GPUFLEET_RENDEZVOUS_PORT" --local-addr "$own_ip")
  else
    arguments+=(--standalone --nnodes 1)
  fi
  rm -f "$LISTENER_FILE"
  # The command itself is not logged: it may hold a token.
  log "starting torchrun ${arguments[*]}"
  "$GPUFLEET_PYTHON" -m torch.distributed.run "${arguments[@]}" "${train_command[@]}" &
  torchrun_pid=$!
}

# workers: print torchrun's children, which have sessions of their own and so no common process group.
workers() {
  cat "/proc/$torchrun_pid/task/"*/children 2>/dev/null || true
}

any_alive() {
  local pid
  for pid in "$@"; do
    if kill -0 "$pid" 2>/dev/null; then return 0; fi
  done
  return 1
}

# supervise: wait for torchrun; end it on a notice once the state is saved or the time is over, or when a GPU broke.
supervise() {
  local status=0 look_at=$((SECONDS + GPUFLEET_GPU_CHECK_S))
  while kill -0 "$torchrun_pid" 2>/dev/null; do
    keep_watching
    keep_telling
    if [[ -e "$DRAIN_FILE" ]]; then
      drain
      break
    fi
    if in_fleet && ((SECONDS >= look_at)); then
      look_at=$((SECONDS + GPUFLEET_GPU_CHECK_S))
      sick="$(fatal_xid_error)"
      if [[ -n "$sick" ]]; then
        end_torchrun
        break
      fi
    fi
    pause 0.5
  done
  wait "$torchrun_pid" || status=$?
  torchrun_pid=""
  return "$status"
}

# drain: have the state saved, and end torchrun. A training process that reads the drain file (bootstrap.training) saves
# by itself; any other process gets SIGTERM, on which most frameworks save, and the same time.
drain() {
  local save_by="" reason="" told_reason="" extend_at=0
  local -a signalled=()
  while kill -0 "$torchrun_pid" 2>/dev/null; do
    keep_watching
    # Read in every pass: a later spot notice may leave less time.
    read -r save_by reason <"$DRAIN_FILE" || true
    [[ "$save_by" =~ ^[0-9]+$ ]] || save_by=$EPOCHSECONDS
    if [[ "$reason" != "$told_reason" ]]; then
      log "leaving: $reason; $((save_by - EPOCHSECONDS)) s to save the state"
      told_reason="$reason"
    fi
    if [[ "$reason" == autoscaling/* ]] && ((SECONDS >= extend_at)); then
      extend_at=$((SECONDS + HOOK_HEARTBEAT_S))
      extend_terminate_hook &
    fi
    if [[ ! -e "$LISTENER_FILE" && ${#signalled[@]} -eq 0 ]]; then
      read -ra signalled <<<"$(workers | tr '\n' ' ')"
      # Between two starts torchrun has no workers; a later pass signals them.
      if [[ ${#signalled[@]} -gt 0 ]]; then
        log "no training process reads the drain file; sending SIGTERM to ${#signalled[@]}"
        kill -TERM "${signalled[@]}" 2>/dev/null || true
      fi
    fi
    if [[ -e "$SAVED_FILE" ]]; then
      log "state is saved; ending torchrun"
      break
    elif [[ ${#signalled[@]} -gt 0 ]] && ! any_alive "${signalled[@]}"; then
      log "the training processes have ended; ending torchrun"
      break
    elif ((EPOCHSECONDS >= save_by)); then
      log "state is NOT saved in time; ending torchrun"
      break
    fi
    pause 0.5
  done
  end_torchrun
}

end_torchrun() {
  local deadline=$((SECONDS + GPUFLEET_KILL_AFTER_S)) left
  kill -TERM "$torchrun_pid" 2>/dev/null || true
  while kill -0 "$torchrun_pid" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      left="$(workers)"
      log "torchrun does not end; killing it"
      # shellcheck disable=SC2086 # one argument a process
      kill -KILL "$torchrun_pid" $left 2>/dev/null || true
      return 0
    fi
    pause 0.5
  done
}

request_drain() {
  [[ -e "$DRAIN_FILE" ]] || ask_drain "launch.sh got SIG$1"
}

# tell_last: report the newest state, within the few seconds that the notice leaves.
tell_last() {
  local until=$((SECONDS + 5))
  while ((SECONDS < until)); do
    keep_telling
    if [[ -z "$teller_pid" ]] || ! kill -0 "$teller_pid" 2>/dev/null; then return 0; fi
    pause 0.2
  done
}

leave() {
  tell_last
  complete_terminate_hook
  log "this node has left the run"
}

stand_by() {
  log "waiting for the group to end this node, which is paid until then"
  until [[ -e "$DRAIN_FILE" ]]; do
    keep_watching
    keep_telling
    pause 1
  done
  log "leaving: $(drain_reason)"
}

rest() {
  local until=$((SECONDS + $1))
  while ((SECONDS < until)) && [[ ! -e "$DRAIN_FILE" ]]; do
    keep_watching
    keep_telling
    pause 1
  done
}

# finish STATUS: exit after the training; in a fleet only when the group ends this node.
finish() {
  if in_fleet; then
    if [[ "$GPUFLEET_MODE" == workers ]]; then
      protect_from_scale_in off
    fi
    stand_by
    leave
    exit 0
  fi
  exit "$1"
}

give_up() {
  log "${*:2}; giving up: journalctl -u gpufleet-train"
  tell gave-up "$1"
  send_log "training gave up"
  finish "$GAVE_UP"
}

replace_node() {
  local check="check-gpus"
  [[ "$sick" != *Xid* ]] || check="check-xid-errors"
  log "this node cannot train any more: $sick"
  tell sick 0 "$check"
  send_log "a GPU broke: $sick"
  until ask_to_be_replaced || [[ -e "$DRAIN_FILE" ]]; do
    log "the group could not be told that this node is unhealthy; trying again"
    rest "$GPUFLEET_TELL_DELAY_S"
  done
  stand_by
  leave
  exit 0
}

# send_log TITLE: send the end of this service's journal to the log group, before the node ends.
send_log() {
  local text
  [[ -n "$GPUFLEET_LOG_GROUP" ]] && command -v journalctl >/dev/null && know_instance_id || return 0
  text="$(mktemp)"
  journalctl --unit gpufleet-train --lines 200 --no-pager >"$text" 2>&1 || true
  "$BOOTSTRAP_DIR/steps/send-log.sh" "train/$INSTANCE_ID" "$1" "$text" ||
    log "the log could not be sent to CloudWatch Logs"
  rm -f "$text"
}

check_settings() {
  local name
  [[ "$GPUFLEET_MODE" == training || "$GPUFLEET_MODE" == workers ]] ||
    die "GPUFLEET_MODE is '$GPUFLEET_MODE'; expected training or workers in $NODE_ENV"
  for name in GPUFLEET_NODE_COUNT GPUFLEET_GPUS_PER_NODE; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die "$name is '${!name}'; expected a count of at least 1 in $NODE_ENV"
  done
  if ! xargs printf '' <<<"$GPUFLEET_TRAIN_COMMAND" 2>/dev/null; then
    die "GPUFLEET_TRAIN_COMMAND in $NODE_ENV has unbalanced quotes"
  fi
  command -v "$GPUFLEET_PYTHON" >/dev/null ||
    die "GPUFLEET_PYTHON is $GPUFLEET_PYTHON, and there is no such program; steps/install-python-env.sh writes it"
  if is_gang && [[ -z "$GPUFLEET_PEERS" && (-z "$GPUFLEET_ASG_NAME" || -z "$GPUFLEET_REGION") ]]; then
    die "GPUFLEET_NODE_COUNT is $GPUFLEET_NODE_COUNT: set GPUFLEET_ASG_NAME and GPUFLEET_REGION, to find the others"
  fi
}

export_settings() {
  export PYTHONPATH="${BOOTSTRAP_DIR%/*}${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONUNBUFFERED=1
  # The plan's memory estimate assumes it: without it, blocks of odd sizes strand a part of the memory
  # (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
  export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
  export GPUFLEET_DRAIN_FILE="$DRAIN_FILE" GPUFLEET_REGION
  export GPUFLEET_PROGRESS_FILE="${GPUFLEET_PROGRESS_FILE:-$PROGRESS_FILE}"
  local name
  for name in "${PLANNED[@]}"; do
    [[ -z "${!name:-}" ]] || export "${name?}"
  done
  if [[ -n "$GPUFLEET_REGION" ]]; then
    export AWS_DEFAULT_REGION="${AWS_DEFAULT_REGION:-$GPUFLEET_REGION}"
  fi
  if [[ -n "$GPUFLEET_BUCKET" ]]; then
    export GPUFLEET_CHECKPOINT_URI="${GPUFLEET_CHECKPOINT_URI:-s3://$GPUFLEET_BUCKET/$GPUFLEET_CHECKPOINT_PREFIX}"
  fi
  if ((GPUFLEET_GPUDIRECT)); then
    export_efa_settings
  fi
}

main() {
  local launches=0 status started
  export_settings
  mkdir -p "$GPUFLEET_RUN_DIR"
  rm -f "$DRAIN_FILE" "$DRAIN_FILE".* "$STATE_FILE" "$TOLD_FILE" "$GPUFLEET_PROGRESS_FILE"
  trap 'request_drain TERM' TERM
  trap 'request_drain INT' INT
  trap 'kill $watcher_pid $teller_pid 2>/dev/null || true' EXIT
  keep_watching

  if [[ -z "${GPUFLEET_TRAIN_COMMAND//[[:space:]]/}" ]]; then
    log "nothing to train: GPUFLEET_TRAIN_COMMAND is empty in $NODE_ENV"
    finish 0
  fi
  (check_settings) || give_up 1 "the training command cannot be started"
  mapfile -d '' -t train_command < <(xargs printf '%s\0' <<<"$GPUFLEET_TRAIN_COMMAND")
  cd -- "$GPUFLEET_TRAIN_DIR" || give_up 1 "GPUFLEET_TRAIN_DIR is $GPUFLEET_TRAIN_DIR, and there is no such folder"

  while true; do
    is_host=1 rendezvous_ip=127.0.0.1 own_ip="" sick=""
    if is_gang && [[ -n "$GPUFLEET_PEERS" ]]; then
      resolve_peers
    elif is_gang; then
      resolve_rendezvous
    fi
    status=0
    started=$SECONDS
    if [[ ! -e "$DRAIN_FILE" ]]; then
      if [[ "$GPUFLEET_MODE" == workers ]]; then
        protect_from_scale_in on
      fi
      start_torchrun
      tell training 0
      supervise || status=$?
    fi
    if [[ -e "$DRAIN_FILE" ]]; then
      leave
      return "$GPUFLEET_LEFT_STATUS"
    fi
    if in_fleet; then
      [[ -n "$sick" ]] || ((status == 0)) || sick="$(broken_gpu)"
      if [[ -n "$sick" ]]; then
        replace_node
      fi
    fi
    if ((status == 0)); then
      tell "done" 0
      if [[ "$GPUFLEET_MODE" == training ]]; then
        log "training is complete"
        finish 0
      fi
      launches=0
      log "the command is done; starting it again in $GPUFLEET_WORKER_PAUSE_S s"
      protect_from_scale_in off
      rest "$GPUFLEET_WORKER_PAUSE_S"
      continue
    fi
    ((SECONDS - started >= GPUFLEET_HEALTHY_S * (GPUFLEET_MAX_RESTARTS + 1))) && launches=0
    launches=$((launches + 1))
    if ((launches >= GPUFLEET_MAX_LAUNCHES)); then
      give_up "$status" "torchrun failed $launches times in a row within $GPUFLEET_HEALTHY_S s a start," \
        "the last with status $status"
    fi
    log "torchrun ended with status $status after $((SECONDS - started)) s; starting it again"
    pause "$GPUFLEET_RELAUNCH_DELAY_S"
  done
}

main "$@"
