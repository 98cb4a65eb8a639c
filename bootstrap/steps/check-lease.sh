#!/usr/bin/env bash
# The dead man's switch: ends this node, with a checkpoint, when the controller no longer counts what it costs. Run by
# gpufleet-lease.timer for as long as the node lives, whatever is trained and even where nothing is.
#
# The controller alone keeps the meter and the ceiling, and writes its state every minute. Should it fall silent for good
# (its function deleted, its role changed, the region's scheduler down), paid nodes must not go on behind its back.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
# shellcheck source-path=SCRIPTDIR source=../fleet.sh
source "$BOOTSTRAP_DIR/fleet.sh"
load_node_env
require_env GPUFLEET_BUCKET GPUFLEET_ASG_NAME GPUFLEET_REGION

# What cannot be read is not silence: a node that is cut off from S3 alone goes on.
written=$(aws_cli s3api head-object --bucket "$GPUFLEET_BUCKET" --key "$CONTROLLER_STATE_KEY" --query LastModified) ||
  die "s3://$GPUFLEET_BUCKET/$CONTROLLER_STATE_KEY cannot be looked at: nobody knows whether the controller counts"
written_at=$(date --date "$written" +%s) || die "$CONTROLLER_STATE_KEY was written at $written, which is no time"
silent_s=$(($(date +%s) - written_at))
((silent_s > LEASE_S)) || exit 0
log "the controller has written nothing for $silent_s s, so nobody counts what this node costs: it saves and ends; see" \
  "the controller's log group, then gpufleet resume"
# The terminate hook holds the node while it saves, and the group does not replace it.
know_instance_id
aws_cli autoscaling terminate-instance-in-auto-scaling-group --instance-id "$INSTANCE_ID" \
  --should-decrement-desired-capacity >/dev/null || die "this node could not leave its group; the next look tries again"
