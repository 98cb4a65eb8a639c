"""Scaling of the group beside the controller: policies on a metric, and scheduled actions.

Policies are for workers only; scheduled actions may also pause a training gang.
"""

from __future__ import annotations

from datetime import UTC, timedelta

import pulumi
import pulumi_aws as aws

from bootstrap.contract.timings import BLOCK_TAIL
from infra import clock
from infra.component import Component, Stack
from infra.settings import Queue

# Published by every node, each minute, for each of its GPUs (bootstrap/cloudwatch-agent.json).
GPU_UTILIZATION = "GpuUtilizationPercent"
PERIOD_S = 60
# One look at the queue is not enough: a node more costs a launch of minutes, a node less its work.
UP_AFTER_MINUTES = 2
DOWN_AFTER_MINUTES = 15
# Tells the provider to leave a size as it is; its default is 0.
UNCHANGED = -1


def steps(nodes: int) -> list[int]:
    """Sizes of a step, in nodes: 1, 2, 4 and so on, and at last all ``nodes``; 11 steps for 1000 nodes, AWS takes 20.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-quotas.html
    """
    sizes = [1]
    while sizes[-1] < nodes:
        sizes.append(min(2 * sizes[-1], nodes))
    return sizes


class Scaling(Component):
    """Target tracking on GPU utilisation, step scaling on the depth of a queue, and scheduled actions."""

    def __init__(self, stack: Stack, group_name: pulumi.Input[str]) -> None:
        super().__init__(stack, None)
        self._group_name = group_name
        scaling = self._settings.scaling
        if scaling:
            if scaling.gpu_utilization_percent is not None:
                self._track_utilization(scaling.gpu_utilization_percent)
            if scaling.queue:
                self._follow_queue(scaling.queue)
            for number, schedule in enumerate(scaling.schedules, start=1):
                time = {"recurrence": schedule.cron, "time_zone": schedule.timezone}
                self._schedule(f"schedule-{number}", schedule.nodes, **time)
        self._drain_before_the_block_ends()
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

    def _follow_queue(self, queue: Queue) -> None:
        """Keep a node for every messagesPerNode messages of the queue, waiting or being worked on.

        The alarms look at the missing nodes: wanted less desired. Nodes in service come minutes later: with their
        number the group would grow again each minute.
        """
        self._step("queue-up", queue, "GreaterThanOrEqualToThreshold", 1, UP_AFTER_MINUTES)
        self._step("queue-down", queue, "LessThanOrEqualToThreshold", -1, DOWN_AFTER_MINUTES)

    def _step(self, name: str, queue: Queue, comparison: str, sign: int, minutes: int) -> None:
        """Policy and alarm for one direction; ``sign`` is 1 for missing nodes, -1 for nodes too many."""
        prefix, sizes, adjustments = self._prefix, steps(self._settings.plan.node_count), []
        for size, following in zip(sizes, [*sizes[1:], None], strict=True):
            # Bounds are relative to the alarm's threshold, one node.
            bounds = [f"{sign * (size - 1)}", None if following is None else f"{sign * (following - 1)}"]
            lower, upper = bounds[::sign]
            adjustments.append(
                aws.autoscaling.PolicyStepAdjustmentArgs(
                    scaling_adjustment=sign * size, metric_interval_lower_bound=lower, metric_interval_upper_bound=upper
                )
            )
        policy = aws.autoscaling.Policy(
            f"{prefix}-{name}",
            autoscaling_group_name=self._group_name,
            policy_type="StepScaling",
            adjustment_type="ChangeInCapacity",
            metric_aggregation_type="Average",
            step_adjustments=adjustments,
            opts=self._own,
        )
        aws.cloudwatch.MetricAlarm(
            f"{prefix}-{name}",
            alarm_description=f"Scales the workers by the depth of queue {queue.name}",
            comparison_operator=comparison,
            threshold=sign,
            evaluation_periods=minutes * 60 // PERIOD_S,
            metric_queries=[
                aws.cloudwatch.MetricAlarmMetricQueryArgs(
                    id="lacking",
                    expression=f"CEIL((FILL(waiting, 0) + FILL(working, 0)) / {queue.messages_per_node}) - desired",
                    label="Nodes that lack",
                    return_data=True,
                ),
                _metric("waiting", "AWS/SQS", "ApproximateNumberOfMessagesVisible", QueueName=queue.name),
                _metric("working", "AWS/SQS", "ApproximateNumberOfMessagesNotVisible", QueueName=queue.name),
                _metric("desired", "AWS/AutoScaling", "GroupDesiredCapacity", AutoScalingGroupName=self._names.group),
            ],
            # Without data nothing changes. SQS is silent for a queue that nobody touched for six hours:
            # https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-monitoring-using-cloudwatch.html
            treat_missing_data="notBreaching",
            alarm_actions=[policy.arn],
            tags=self._tags,
            opts=self._own,
        )

    def _schedule(self, name: str, nodes: int, **time: str) -> None:
        name = f"{self._prefix}-{name}"
        aws.autoscaling.Schedule(
            name,
            scheduled_action_name=name,
            autoscaling_group_name=self._group_name,
            desired_capacity=nodes,
            min_size=UNCHANGED,
            max_size=UNCHANGED,
            opts=self._own,
            **time,
        )

    def _drain_before_the_block_ends(self) -> None:
        """Drain the fleet, should the controller not have done so some minutes earlier."""
        plan = self._settings.plan
        block = plan.purchase.capacity_block
        if block is None:
            return
        # The terminate hook ends before AWS ends the node.
        moment = (block.end - BLOCK_TAIL - timedelta(seconds=plan.terminate_timeout_s)).astimezone(UTC)
        # Auto Scaling takes no time in the past.
        if moment > clock.now():
            self._schedule("block-end", 0, start_time=f"{moment:%Y-%m-%dT%H:%M:%SZ}")


def _metric(key: str, namespace: str, name: str, **dimensions: str) -> aws.cloudwatch.MetricAlarmMetricQueryArgs:
    return aws.cloudwatch.MetricAlarmMetricQueryArgs(
        id=key,
        metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
            namespace=namespace, metric_name=name, period=PERIOD_S, stat="Average", dimensions=dimensions
        ),
    )
