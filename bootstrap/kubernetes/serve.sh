#!/usr/bin/env bash
# Runs on a Kubernetes node from kubelet's start to the node's end: completes the lifecycle hooks, passes notices on to
# the training container, and passes the container's state on to the controller.
#
# The container cannot reach the metadata service, which answers over one hop only. Both share the folder
# GPUFLEET_RUN_DIR (/run/gpufleet) with the files of bootstrap/training/notices.py, and the agent's state.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# Seconds between two polls of the metadata service, and while the node leaves; a spot notice comes two minutes ahead.
: "${NOTICE_POLL_S:=5}"
: "${LEAVE_POLL_S:=1}"
: "${KUBELET_URL:=http://127.0.0.1:10248/healthz}"
# Seconds until kubelet must be healthy: it starts within a minute or never.
: "${KUBELET_LIMIT_S:=600}"
# Seconds without training after which the node reports that it gave up: its pod cannot start, or nobody made one.
: "${IDLE_LIMIT_S:=1800}"
# Seconds of a spot notice to keep after the save, as in bootstrap/training/notices.py.
: "${SPOT_RESERVE_S:=40}"

readonly STATE_FILE="$GPUFLEET_RUN_DIR/state"

# metadata PATH: print its value; nothing where there is none or no answer, which are both no notice.
metadata() {
  local token
  token=$(curl --fail --silent --max-time 2 --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
    "$IMDS_URL/latest/api/token") || return 0
  # The header goes through stdin: the process list would show an argument.
  printf 'X-aws-ec2-metadata-token: %s' "$token" |
    curl --fail --silent --max-time 2 --header @- "$IMDS_URL/latest/meta-data/$1" || true
}

json_field() {
  sed --silent "s/.*\"$1\" *: *\"\([^\"]*\)\".*/\1/p"
}

# write FILE WORD...: write a line outside the shared folder and move in, so that nobody reads half of the file and a
# container's link is not followed.
write() {
  local new
  new=$(mktemp "$GPUFLEET_RUN_DIR.XXXXXX")
  printf '%s\n' "${*:2}" >"$new"
  chmod 0644 "$new"
  mv --force --no-target-directory "$new" "$1"
}

# poll: set leaving and save_by from the metadata service; ask for a checkpoint on a rebalance recommendation.
poll() {
  local value time by
  value=$(metadata spot/instance-action)
  if [[ -n $value ]]; then
    time=$(json_field time <<<"$value")
    by=$(date --date "${time:-now}" +%s 2>/dev/null || date +%s)
    by=$((by - SPOT_RESERVE_S))
    if [[ -z $leaving ]] || ((by < save_by)); then
      save_by=$by
      leaving="spot/instance-action ($(json_field action <<<"$value") at ${time:-unknown time})"
    fi
  fi
  value=$(metadata autoscaling/target-lifecycle-state)
  if [[ -z $leaving && $value == Terminated ]]; then
    save_by=$((EPOCHSECONDS + GPUFLEET_SCALE_IN_LIMIT_S))
    leaving="autoscaling/target-lifecycle-state ($value)"
  fi
  value=$(metadata events/recommendations/rebalance)
  if [[ -n $value && $value != "$rebalance" ]]; then
    rebalance=$value
    write "$DRAIN_FILE.save" "$EPOCHSECONDS" "events/recommendations/rebalance ($(json_field noticeTime <<<"$value"))"
  fi
}

training_runs() {
  # Without a command, which this service's own calls have.
  pgrep --full '/opt/gpufleet/bootstrap/agent$' >/dev/null
}

# pass_state_on: report the agent's state to the controller until that succeeded.
pass_state_on() {
  local state=""
  [[ -f $STATE_FILE && ! -L $STATE_FILE ]] && read -r state <"$STATE_FILE" || true
  [[ $state =~ ^(training|done|gave-up)\ [0-9]+$ && $state != "$told" ]] || return 0
  # The controller ends the nodes of a run that gave up, and their disks with them.
  if [[ $state == gave-up* && -z $logged ]]; then
    logged=1
    send_container_log || log "the container's log could not be sent to CloudWatch Logs"
  fi
  # shellcheck disable=SC2086 # state and exit status
  if agent tell $state; then told=$state; fi
}

# send_container_log: send the end of the training container's newest log (infra/kubernetes/manifests.py has the names),
# as kubelet keeps it: https://kubernetes.io/docs/concepts/cluster-administration/logging/#log-location-node
send_container_log() {
  local file
  file=$(find "$ROOT/var/log/pods" -path '*/gpufleet_*' \( -path '*/train/*.log' -o -path '*/pytorch/*.log' \) \
    -printf '%T@ %p\n' 2>/dev/null | sort --numeric-sort | sed --silent '$s/^[^ ]* //p')
  [[ -n $file ]] || return 0
  "$BOOTSTRAP_DIR/steps/send-log.sh" "train/$(imds instance-id)" "training gave up" "$file"
}

# leave: have the container save, and complete the terminate hook when it has ended or its time is over.
leave() {
  local extend_at=0
  log "leaving: $leaving"
  while training_runs && ((EPOCHSECONDS < save_by + SPOT_RESERVE_S)); do
    # Again after a container that just started cleared the folder.
    [[ -e $DRAIN_FILE && $(<"$DRAIN_FILE") == "$save_by $leaving" ]] || write "$DRAIN_FILE" "$save_by" "$leaving"
    if [[ $leaving == autoscaling/* ]] && ((EPOCHSECONDS >= extend_at)); then
      extend_at=$((EPOCHSECONDS + HOOK_HEARTBEAT_S))
      agent extend-terminate-hook || log "a heartbeat of the terminate hook could not be sent"
    fi
    sleep "$LEAVE_POLL_S"
    poll
  done
  pass_state_on
  agent complete-terminate-hook || log "the terminate hook could not be completed; its timeout will"
}

load_node_env
require_env GPUFLEET_SCALE_IN_LIMIT_S
mkdir -p "$GPUFLEET_RUN_DIR"
leaving="" save_by=0 rebalance="" told="" logged="" sick=""

until curl --fail --silent --max-time 5 --output /dev/null "$KUBELET_URL"; do
  if ((SECONDS >= KUBELET_LIMIT_S)); then
    "$BOOTSTRAP_DIR/steps/complete-launch-hook.sh" ABANDON || true
    log "FAIL kubelet is not healthy after $KUBELET_LIMIT_S s, shutting down; journalctl -u kubelet -u nodeadm-run"
    shutdown -h now
    exit 1
  fi
  sleep "$NOTICE_POLL_S"
done
# For the pod's metrics (bootstrap/metrics).
write "$GPUFLEET_RUN_DIR/instance-id" "$(imds instance-id || true)"
"$BOOTSTRAP_DIR/steps/complete-launch-hook.sh" CONTINUE

busy_at=$SECONDS
while [[ -z $leaving ]]; do
  poll
  pass_state_on
  if training_runs || [[ $told == done* || $told == gave-up* ]]; then
    busy_at=$SECONDS
  elif ((SECONDS - busy_at >= IDLE_LIMIT_S)); then
    log "nothing has trained here for $IDLE_LIMIT_S s; kubectl get pods -n gpufleet tells why"
    if agent tell gave-up 1 idle; then told="gave-up 1"; fi
  fi
  if [[ -z $sick ]]; then
    sick=$(fatal_xid_error)
    if [[ -n $sick ]]; then
      log "a GPU broke: $sick"
      agent tell sick 0 check-xid-errors || true
      agent ask-to-be-replaced || sick=""
    fi
  fi
  sleep "$NOTICE_POLL_S"
done
leave
