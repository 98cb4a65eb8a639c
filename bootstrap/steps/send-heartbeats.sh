#!/usr/bin/env bash
# Keeps the launch hook open while the steps run, at most NODE_INIT_TIMEOUT_S.
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh" || exit 1

while ((SECONDS < NODE_INIT_TIMEOUT_S)); do
  sleep "$HOOK_HEARTBEAT_S"
  # Each time: where the metadata service does not answer once, the next heartbeat comes all the same.
  aws autoscaling record-lifecycle-action-heartbeat --region "$GPUFLEET_REGION" \
    --lifecycle-hook-name "$LAUNCH_HOOK" --auto-scaling-group-name "${GPUFLEET_ASG_NAME%%,*}" \
    --instance-id "$(imds instance-id)" || log "a heartbeat of the launch hook was not taken"
done
