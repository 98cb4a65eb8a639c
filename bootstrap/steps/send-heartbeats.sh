#!/usr/bin/env bash
# Keeps the launch hook open while the steps run, at most NODE_INIT_TIMEOUT_S.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
load_node_env

[[ -n ${GPUFLEET_LAUNCH_HOOK:-} ]] || exit 0
instance=$(imds instance-id)
while ((SECONDS < NODE_INIT_TIMEOUT_S)); do
  sleep "$HOOK_HEARTBEAT_S"
  aws autoscaling record-lifecycle-action-heartbeat --region "$GPUFLEET_REGION" \
    --lifecycle-hook-name "$GPUFLEET_LAUNCH_HOOK" --auto-scaling-group-name "$GPUFLEET_ASG_NAME" \
    --instance-id "$instance" || log "a heartbeat of the launch hook was not taken"
done
