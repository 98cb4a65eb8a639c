"""How long a node may take to save its state and leave: as long as the plan's checkpoint needs, and no longer."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from optimizer.plan import CapacityBlock, FleetPlan

# What one node writes to S3, GiB/s: half of the 10 connections that boto3's transfer manager opens, at the 85 MB/s AWS
# plans a connection with; half, as a checkpoint that is cut off is a checkpoint lost. Both pages read 2026-11-21:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-design-patterns.html
# https://boto3.amazonaws.com/v1/documentation/api/latest/guide/s3.html#concurrent-transfer-operations
SAVE_GIB_PER_S = 0.5 * 10 * 85e6 / 2**30
# A small model's checkpoint takes seconds; a retried upload or a step that hangs takes minutes.
SHORTEST_SAVE_LIMIT_S = 240
# Beside the save: up to 5 s until the node has seen that it is to leave, then up to 30 s until torchrun has ended, and
# the call that completes the hook.
LEAVING_S = 60
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutLifecycleHook.html
HOOK_LIMIT_S = 7200


def save_limit_s(plan: FleetPlan) -> int:
    """Seconds a node gets for its last checkpoint: the step it is in, the next one, after which all stop, the upload.

    A state that every rank holds whole is written by one node, a sharded one by all of them together.
    """
    writers = 1 if plan.parallelism.sharding == "ddp" else plan.node_count
    upload_s = plan.job.checkpoint_gib / (SAVE_GIB_PER_S * writers)
    needed = math.ceil(2 * plan.step_time_s + upload_s)
    return min(max(needed, SHORTEST_SAVE_LIMIT_S), HOOK_LIMIT_S - LEAVING_S)


def terminate_timeout_s(plan: FleetPlan) -> int:
    """Timeout of the terminate hook, seconds: time to save and to leave, at most what AWS allows.

    On scale-in only: a spot interruption ends the node two minutes after its notice all the same.
    """
    return save_limit_s(plan) + LEAVING_S


def drain_at(plan: FleetPlan, block: CapacityBlock) -> datetime:
    """When a Capacity Block's nodes must be told to leave at the latest: their hook ends before AWS ends them.

    AWS ends them from 30 minutes before the block's end on:
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html
    """
    return block.end - timedelta(minutes=30, seconds=terminate_timeout_s(plan))
