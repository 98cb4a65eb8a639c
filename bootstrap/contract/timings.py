"""Times that two sides of gpufleet rely on: the plan reserves them, the controller keeps them, nodes live by them."""

from __future__ import annotations

import math
from datetime import timedelta

# Interval of the controller's schedule (infra/controller.py).
TICK = timedelta(minutes=1)
# The controller is silent after this many missed ticks: nobody meters or ends the nodes.
SILENT = 5 * TICK
# Age of control/state.json at which a node saves and ends itself: longer than most AWS outages and than a person takes
# who sees the alarm after SILENT; cheap beside a run. LEASE_S of bootstrap/lib.sh is the same number; a test compares.
LEASE = timedelta(minutes=30)
# A node checks its lease every five minutes (gpufleet-lease.timer), and Auto Scaling takes minutes to act.
LEASE_ACTS = timedelta(minutes=10)

# Upload speed of one node to S3, GiB/s: half of the 10 connections that boto3's transfer manager opens, at the 85 MB/s
# AWS plans a connection with; half, as a checkpoint that is cut off is a checkpoint lost. Both pages read 2026-11-21:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html
# https://boto3.amazonaws.com/v1/documentation/api/latest/guide/s3.html#concurrent-transfer-operations
SAVE_GIB_PER_S = 0.5 * 10 * 85e6 / 2**30
# A small model's checkpoint takes seconds; a retried upload or a step that hangs takes minutes.
SHORTEST_SAVE_LIMIT_S = 240
# After the save: up to 5 s until the node sees that it must leave, up to 30 s until torchrun has ended, and the call
# that completes the hook.
LEAVING_S = 60
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutLifecycleHook.html
HOOK_LIMIT_S = 7200
# From a lower desired size to the last node's end, without the checkpoint: Auto Scaling looks at the group about once a
# minute, and a hook that no node completes is completed by the first tick after its limit.
ENDING = timedelta(minutes=3)
_ENDING_S = int((ENDING + TICK).total_seconds())
# EC2 begins to end a Capacity Block's instances this long before the block's end:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-how.html
BLOCK_TAIL = timedelta(minutes=30)


def seconds_to_save(step_time_s: float, checkpoint_gib: float, writers: int) -> int:
    """Time limit of a node's last checkpoint, s: the running step, the next one, after which all stop, and the upload.

    ``writers`` nodes write the checkpoint of ``checkpoint_gib`` together.
    """
    upload_s = checkpoint_gib / (SAVE_GIB_PER_S * writers)
    needed = math.ceil(2 * step_time_s + upload_s)
    return min(max(needed, SHORTEST_SAVE_LIMIT_S), HOOK_LIMIT_S - LEAVING_S)


def seconds_to_end(step_time_s: float, checkpoint_gib: float, writers: int) -> int:
    """Drain reserve, s: the controller drains a fleet while its dollars or its Capacity Block still last this long."""
    return seconds_to_save(step_time_s, checkpoint_gib, writers) + LEAVING_S + _ENDING_S
