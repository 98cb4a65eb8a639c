#!/usr/bin/env bash
# Lease of this node: ends the node, with a checkpoint, when the controller stopped metering it. Run by
# gpufleet-lease.timer as long as the node lives.
#
# Only the controller meters and keeps the ceiling, and it writes its state every minute. Where its writing stops for
# good (function deleted, role changed, scheduler down), paid nodes must not go on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
source "$BOOTSTRAP_DIR/fleet.sh"
load_node_env
require_env GPUFLEET_BUCKET GPUFLEET_ASG_NAME GPUFLEET_REGION

# An unreadable state is no silence: a node that only lost its way to S3 goes on.
written=$(aws_cli s3api head-object --bucket "$GPUFLEET_BUCKET" --key "$CONTROLLER_STATE_KEY" --query LastModified) ||
  die "s3://$GPUFLEET_BUCKET/$CONTROLLER_STATE_KEY cannot be read: nobody knows whether the controller meters"
written_at=$(date --date "$written" +%s) || die "$CONTROLLER_STATE_KEY was written at $written, which is no time"
silent_s=$(($(date +%s) - written_at))
((silent_s > LEASE_S)) || exit 0
log "the controller has written nothing for $silent_s s, so nobody meters this node: it saves and ends; see the" \
  "controller's log group, then gpufleet resume"
# The terminate hook holds the node while it saves; the group does not replace it.
know_instance_id
aws_cli autoscaling terminate-instance-in-auto-scaling-group --instance-id "$INSTANCE_ID" \
  --should-decrement-desired-capacity >/dev/null || die "this node could not leave its group; the next check tries again"
