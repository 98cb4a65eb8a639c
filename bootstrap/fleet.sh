# shellcheck shell=bash
# Calls to the Auto Scaling group, and reports to the controller. Sourced after lib.sh; uses GPUFLEET_REGION,
# GPUFLEET_ASG_NAME, GPUFLEET_TERMINATE_HOOK, GPUFLEET_BUCKET and GPUFLEET_RUN, each empty where there is none. No
# function ends the caller: AWS may be out of reach, and training goes on without it.

# aws_cli ARGUMENT...: run the AWS CLI with text output, at most 60 s.
aws_cli() {
  timeout --kill-after=5 60 aws --region "$GPUFLEET_REGION" --output text \
    --cli-connect-timeout 5 --cli-read-timeout 20 "$@"
}

INSTANCE_ID=""

know_instance_id() {
  [[ -n $INSTANCE_ID ]] || INSTANCE_ID=$(imds instance-id)
}

complete_terminate_hook() {
  [[ -n ${GPUFLEET_TERMINATE_HOOK:-} && -n ${GPUFLEET_ASG_NAME:-} ]] || return 0
  know_instance_id || return 0
  if aws_cli autoscaling complete-lifecycle-action --auto-scaling-group-name "$GPUFLEET_ASG_NAME" \
    --lifecycle-hook-name "$GPUFLEET_TERMINATE_HOOK" --instance-id "$INSTANCE_ID" \
    --lifecycle-action-result CONTINUE >/dev/null; then
    log "terminate hook $GPUFLEET_TERMINATE_HOOK completed"
  else
    # No hook waits on a spot interruption or a plain stop of the service.
    log "terminate hook $GPUFLEET_TERMINATE_HOOK not completed; its timeout will"
  fi
}

extend_terminate_hook() {
  [[ -n ${GPUFLEET_TERMINATE_HOOK:-} && -n ${GPUFLEET_ASG_NAME:-} ]] || return 0
  know_instance_id || return 0
  aws_cli autoscaling record-lifecycle-action-heartbeat --auto-scaling-group-name "$GPUFLEET_ASG_NAME" \
    --lifecycle-hook-name "$GPUFLEET_TERMINATE_HOOK" --instance-id "$INSTANCE_ID" >/dev/null ||
    log "a heartbeat of terminate hook $GPUFLEET_TERMINATE_HOOK was not taken"
}

# protect_from_scale_in on|off: keep the group from choosing this node when it shrinks, or let it.
protect_from_scale_in() {
  local option=--protected-from-scale-in
  [[ -n ${GPUFLEET_ASG_NAME:-} ]] || return 0
  know_instance_id || return 0
  [[ $1 == on ]] || option=--no-protected-from-scale-in
  aws_cli autoscaling set-instance-protection --auto-scaling-group-name "$GPUFLEET_ASG_NAME" --instance-ids "$INSTANCE_ID" \
    "$option" >/dev/null || log "scale-in protection of this node could not be turned $1"
}

# ask_to_be_replaced: mark this node unhealthy; the group ends it and starts another.
ask_to_be_replaced() {
  [[ -n ${GPUFLEET_ASG_NAME:-} ]] || return 0
  know_instance_id || return 1
  aws_cli autoscaling set-instance-health --instance-id "$INSTANCE_ID" --health-status Unhealthy \
    --no-should-respect-grace-period >/dev/null
}

# tell_controller STATE EXIT_STATUS [STEP]: write the node report control/nodes/<instance id>.json (contract/report.py).
tell_controller() {
  local body status=0
  [[ -n ${GPUFLEET_BUCKET:-} && -n ${GPUFLEET_ASG_NAME:-} ]] || return 0
  know_instance_id || return 1
  body=$(mktemp) || return 1
  printf '{"schema_version": 1, "run": "%s", "state": "%s", "exit_status": %d, "step": "%s", "at": "%s"}\n' \
    "${GPUFLEET_RUN:-}" "$1" "$2" "${3:-}" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$body"
  # Encrypted by the bucket's default, the stack's key.
  aws_cli s3api put-object --bucket "$GPUFLEET_BUCKET" --key "$NODE_STATES_PREFIX/$INSTANCE_ID.json" --body "$body" \
    --content-type application/json >/dev/null || status=$?
  rm -f "$body"
  return "$status"
}
