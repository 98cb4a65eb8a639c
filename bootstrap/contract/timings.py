"""Times that the plan reserves, the controller keeps and nodes live by."""

from __future__ import annotations

import math
from datetime import timedelta

HOUR = timedelta(hours=1)
# Interval of the controller's schedule (infra/controller.py).
TICK = timedelta(minutes=1)
# To boot and test nodes: a start that can pay for less trains nothing.
BOOT = timedelta(minutes=30)
# Adaptive gangs that all places refused ask again after so long: without nodes nothing is paid.
ASK_AGAIN = timedelta(minutes=5)
# Survivors of a gang wait for the replacement that AWS refuses about as long as their own boot, tests and loading
# would cost again.
REFUSED_REPLACEMENT = timedelta(minutes=10)
# Without a tick for so long, the controller is silent.
SILENT = 5 * TICK
# Age of control/state.json at which a node ends itself: longer than most AWS outages, and than a person takes after the
# alarm at SILENT.
LEASE = timedelta(minutes=30)
# Nodes check their lease every five minutes (gpufleet-lease.timer), and Auto Scaling takes minutes to act.
LEASE_ACTS = timedelta(minutes=10)

# A node's upload speed to S3, GiB/s: half (a cut-off checkpoint is lost) of boto3's 10 connections, at the 85 MB/s
# AWS plans a connection with. Both pages read 2026-11-21:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html
# https://boto3.amazonaws.com/v1/documentation/api/latest/guide/s3.html#concurrent-transfer-operations
SAVE_GIB_PER_S = 0.5 * 10 * 85e6 / 2**30
# A retried upload or a step that hangs takes minutes.
SHORTEST_SAVE_LIMIT_S = 240
# After the save: 5 s until the node sees that it must leave, 30 s until torchrun has ended, and the hook's call.
LEAVING_S = 60
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutLifecycleHook.html
HOOK_LIMIT_S = 7200
# From a lower desired size to the last node's end, without the checkpoint: Auto Scaling looks about once a minute.
ENDING = timedelta(minutes=3)
# EC2 begins to end a Capacity Block's instances this long before the block's end:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-how.html
BLOCK_TAIL = timedelta(minutes=30)


def seconds_to_store(checkpoint_gib: float, writers: int) -> float:
    """Seconds until a checkpoint that ``writers`` nodes write together is in S3."""
    return checkpoint_gib / (SAVE_GIB_PER_S * writers)


def seconds_to_save(step_time_s: float, checkpoint_gib: float, writers: int) -> int:
    """Time limit of the last checkpoint, s: the running step, the next, after which all stop, and the nodes' upload."""
    needed = math.ceil(2 * step_time_s + seconds_to_store(checkpoint_gib, writers))
    return min(max(needed, SHORTEST_SAVE_LIMIT_S), HOOK_LIMIT_S - LEAVING_S)


def seconds_to_end(step_time_s: float, checkpoint_gib: float, writers: int) -> int:
    """Drain reserve, s: the controller drains a fleet while its dollars or its block still last this long."""
    return seconds_to_save(step_time_s, checkpoint_gib, writers) + LEAVING_S + int((ENDING + TICK).total_seconds())
