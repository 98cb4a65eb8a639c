#!/usr/bin/env bash
# Makes a fresh instance a node that trains, or has the instance replaced. Run as root by user data.
#
# Runs every script of steps/ with a line "# Order: N", by N. Each step ends early where its work is done, so a set-up
# that was cut off can start again. Any failure ends the node: the launch hook gets ABANDON and the Auto Scaling group
# starts another instance. A notice that this node ends stops the running step.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh" || exit 1

current=start
step="" heartbeats="" watcher=""
# Writes DRAIN_FILE when a notice says that this node ends. The system's Python runs it, as notices also come before or
# without an environment with torch.
watch_notices=(env "PYTHONPATH=${BOOTSTRAP_DIR%/*}" python3 -m bootstrap.training.watcher "$DRAIN_FILE" --once)

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
    # The console output stays readable for about an hour after the instance is gone (GetConsoleOutput).
    if [[ -w $ROOT/dev/console ]]; then tail -n 5 "$LOG_FILE" >"$ROOT/dev/console" || true; fi
    # Bounded: the instance costs money until ABANDON.
    timeout 60 python3 "$BOOTSTRAP_DIR/agent" report-failure "$current" "$status" || log "the failure could not be reported"
  fi
  # A node in service, or one whose ABANDON fails, ends itself rather than wait for the hook's timeout: the launch
  # template makes a shutdown a termination, and the group replaces the node.
  if "$BOOTSTRAP_DIR/steps/complete-launch-hook.sh" ABANDON || [[ -e $DRAIN_FILE ]]; then
    leave_group
  else
    log "ABANDON failed, shutting down" && shutdown -h now
  fi
  exit "$status"
}

# leave_group: wait until the group ends this abandoned node, and complete the terminate hook: there is nothing to save.
leave_group() {
  [[ -e $DRAIN_FILE ]] || timeout "$LEAVE_LIMIT_S" "${watch_notices[@]}" || true
  if [[ -e $DRAIN_FILE ]]; then
    agent complete-terminate-hook || log "the terminate hook could not be completed; its timeout will"
  else
    log "the group has not ended this node within $LEAVE_LIMIT_S s, shutting down" && shutdown -h now
  fi
}

# run_step NAME [ARGUMENT...]: run steps/NAME.sh or checks/NAME.sh within the time left, until a notice ends this node.
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
    # A watcher that exited without a notice brings none.
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
export NODE_INIT_TIMEOUT_S=$((NODE_INIT_TIMEOUT_S + ${GPUFLEET_STAGING_LIMIT_S:-0}))

case $(cat "$STATE_DIR/launch-hook" 2>/dev/null || true) in
  CONTINUE)
    log "this node is in service already"
    run_step start-training
    exit 0
    ;;
  ABANDON) die "this node was abandoned before" ;;
esac

setsid "$BOOTSTRAP_DIR/steps/send-heartbeats.sh" 9>&- &
heartbeats=$!
"${watch_notices[@]}" 9>&- &
watcher=$!
steps=$(in_order steps)
for name in $steps; do run_step "$name"; done
run_step check-xid-errors # again: the smoke test may have shown a sick GPU
run_step complete-launch-hook CONTINUE
run_step start-training
log "node ready after $SECONDS s"
