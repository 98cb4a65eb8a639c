"""Scaling of the group beside the controller: a policy for workers, and the drain of a Capacity Block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import pulumi
import pulumi_aws as aws

from bootstrap.contract.timings import BLOCK_TAIL
from infra.component import Component, Stack
from infra.places import DeclaredPlace
from optimizer.contract.plan import CapacityBlock

# Published by every node, each minute, for each of its GPUs (bootstrap/cloudwatch-agent.json).
GPU_UTILIZATION = "GpuUtilizationPercent"


class Scaling(Component):
    """Target tracking on GPU utilisation, and a scheduled action before a Capacity Block ends."""

    def __init__(self, stack: Stack, places: Iterable[DeclaredPlace], group_names: Sequence[pulumi.Input[str]]) -> None:
        super().__init__(stack)
        self._group_name = group_names[0]
        scaling = self._settings.scaling
        if scaling and scaling.gpu_utilization_percent is not None:
            self._track_utilization(scaling.gpu_utilization_percent)
        for place, group_name in zip(places, group_names, strict=True):
            if place.block:
                self._drain_before_the_end(place.block, group_name, "" if place.number == 1 else f"-{place.number}")
        self.register_outputs({})

    def _track_utilization(self, percent: float) -> None:
        """Add nodes above ``percent``, the mean over the nodes in service, and take nodes below.

        https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-scaling-target-tracking.html
        """
        aws.autoscaling.Policy(
            f"{self._prefix}-gpu-utilization",
            autoscaling_group_name=self._group_name,
            policy_type="TargetTrackingScaling",
            target_tracking_configuration={
                "target_value": percent,
                "customized_metric_specification": {
                    "namespace": self._names.metric_namespace,
                    "metric_name": GPU_UTILIZATION,
                    "statistic": "Average",
                },
            },
            opts=self._own,
        )

    def _drain_before_the_end(self, block: CapacityBlock, group_name: pulumi.Input[str], suffix: str) -> None:
        """Drain a block's nodes, should the controller not have done so some minutes earlier."""
        # The terminate hook ends before AWS ends the node.
        hook = timedelta(seconds=self._settings.plan.terminate_timeout_s)
        moment = (block.end - BLOCK_TAIL - hook).astimezone(UTC)
        # Auto Scaling takes no time in the past.
        if moment > datetime.now(UTC):
            name = f"{self._prefix}-block-end{suffix}"
            aws.autoscaling.Schedule(
                name,
                scheduled_action_name=name,
                autoscaling_group_name=group_name,
                desired_capacity=0,
                # Auto Scaling takes no size below the smallest, which is not 0 where workers stand by:
                # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_UpdateAutoScalingGroup.html
                min_size=0,
                max_size=-1,  # The provider leaves it; its default is 0.
                start_time=f"{moment:%Y-%m-%dT%H:%M:%SZ}",
                opts=self._own,
            )
