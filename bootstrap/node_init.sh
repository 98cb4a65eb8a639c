#!/usr/bin/env bash
# Makes a fresh instance a node that trains, or has it replaced: the steps below, in this order. Run as root by user
# data. Each step ends early where its work is done, so a run that was cut off can be started again. A failure, whatever
# it is, ends the node: the launch hook gets ABANDON and the Auto Scaling group starts another one. So does a group that
# no longer wants the node: nobody waits for a step that is of no use.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source-path=SCRIPTDIR source=fleet.sh
source "$BOOTSTRAP_DIR/fleet.sh"

STEPS=(
  check-platform        # Ubuntu, root, node.env complete, the tools the other steps use
  start-lease           # before what may fail: nodes that nobody counts must not be replaced again and again
  install-nvidia-driver # the rest of the software: asserted on a Deep Learning AMI, installed on other images
  install-cuda
  install-nccl
  install-efa
  install-container-toolkit
  mount-nvme # before the Python environment: wheels are unpacked there
  install-python-env
  fetch-training-code
  check-health     # every script of checks/
  run-smoke-test   # DDP on this node's own GPUs
  check-xid-errors # again: did the smoke test wake a sick GPU?
)

current=start
step="" heartbeats="" watcher=""

on_exit() {
  local status=$?
  trap - EXIT
  if [[ -n $step ]]; then kill "$step" 2>/dev/null || true; fi
  if [[ -n $heartbeats ]]; then kill -- "-$heartbeats" "$heartbeats" 2>/dev/null || true; fi
  if [[ -n $watcher ]]; then kill "$watcher" 2>/dev/null || true; fi
  if ((status == 0)); then return; fi
  if [[ -e $DRAIN_FILE ]]; then
    log "this node is taken away during $current: $(drain_reason)"
  else
    log "FAIL node set-up failed in $current with exit code $status after $SECONDS s: this node is replaced"
    # Bounded: the instance is paid until ABANDON is said.
    timeout 60 "$BOOTSTRAP_DIR/steps/report-failure.sh" "$current" "$status" || log "the failure could not be reported"
  fi
  # A node that is in service already, or cannot say ABANDON, ends itself: the launch template makes a shutdown a
  # termination, and the group replaces it. Waiting for the hook's timeout would be paid for.
  if "$BOOTSTRAP_DIR/steps/complete-launch-hook.sh" ABANDON || [[ -e $DRAIN_FILE ]]; then
    leave_group
  else
    log "ABANDON failed, shutting down" && shutdown -h now
  fi
  exit "$status"
}

# leave_group: the group ends an abandoned node, through its terminate hook. Nothing here has to be saved, so the hook is
# completed at once and its timeout is not paid for.
leave_group() {
  [[ -e $DRAIN_FILE ]] || timeout "$LEAVE_LIMIT_S" "$BOOTSTRAP_DIR/steps/wait-for-drain.sh" || true
  if [[ -e $DRAIN_FILE ]]; then
    complete_terminate_hook
  else
    log "the group has not ended this node within $LEAVE_LIMIT_S s, shutting down" && shutdown -h now
  fi
}

# run_step NAME [ARGUMENT...]: run steps/NAME.sh or checks/NAME.sh within what is left of the time, and only while the
# group wants this node.
run_step() {
  local script=$BOOTSTRAP_DIR/steps/$1.sh left=$((NODE_INIT_TIMEOUT_S - SECONDS)) began=$SECONDS
  current=$1
  [[ -x $script ]] || script=$BOOTSTRAP_DIR/checks/$1.sh
  ((left > 0)) || die "no time left for $1: NODE_INIT_TIMEOUT_S is $NODE_INIT_TIMEOUT_S"
  shift
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout --kill-after=30 "$left" bash -o pipefail -c '"${@:2}" 2>&1 | tee -a "$1"' step "$LOG_FILE" "$script" "$@" &
  step=$!
  if [[ -n $watcher ]]; then
    wait -n "$step" "$watcher" || true
    if [[ -e $DRAIN_FILE ]]; then exit 1; fi
    # One that ended without a notice will not bring one.
    kill -0 "$watcher" 2>/dev/null || watcher=""
  fi
  wait "$step"
  step=""
  log "$current took $((SECONDS - began)) s"
}

umask 022
mkdir -p "$LOG_DIR" "$STATE_DIR"
LOG_COPY=$LOG_FILE
exec 9>"$STATE_DIR/lock"
flock --nonblock 9 || {
  log "another node_init.sh is running"
  exit 1
}
[[ -e $NODE_ENV ]] || die "$NODE_ENV is missing: this is not a node of a fleet, or its user data failed"

rm -f "$DRAIN_FILE"
trap on_exit EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
load_node_env

case $(cat "$STATE_DIR/launch-hook" 2>/dev/null || true) in
  CONTINUE)
    log "this node is in service already"
    run_step start-metrics
    run_step start-training
    exit 0
    ;;
  ABANDON) die "this node was abandoned before" ;;
esac

setsid "$BOOTSTRAP_DIR/steps/send-heartbeats.sh" 9>&- &
heartbeats=$!
watch_notices --once 9>&- &
watcher=$!
for name in "${STEPS[@]}"; do run_step "$name"; done
# Asked before the hook is completed: a node of the warm pool is stopped as soon as it is.
target=$(imds autoscaling/target-lifecycle-state) || target=""
run_step complete-launch-hook CONTINUE
if [[ $target == Warmed:* ]]; then
  log "node ready for the warm pool after $SECONDS s: it is stopped, and comes here again when it is wanted"
  exit 0
fi
run_step start-metrics
run_step start-training
log "node ready after $SECONDS s"
