#!/usr/bin/env bash
# complete-launch-hook.sh CONTINUE|ABANDON: tells the Auto Scaling group, once, whether this node joins.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

result=$1
[[ $result == CONTINUE || $result == ABANDON ]] || die "$result is neither CONTINUE nor ABANDON"
state=$STATE_DIR/launch-hook
before=$(cat "$state" 2>/dev/null || true)
if [[ $before == "$result" ]]; then exit 0; fi
[[ -z $before ]] || die "the launch hook has been completed with $before already"

instance=$(imds instance-id)
aws autoscaling complete-lifecycle-action --region "$GPUFLEET_REGION" \
  --lifecycle-hook-name "$LAUNCH_HOOK" --auto-scaling-group-name "${GPUFLEET_ASG_NAME%%,*}" \
  --instance-id "$instance" --lifecycle-action-result "$result"
log "launch hook completed with $result for $instance"
mkdir -p "$STATE_DIR"
printf '%s\n' "$result" >"$state"
