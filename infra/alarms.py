"""The stack's alarms as plain data. Metrics of the stack's namespace have no dimensions and come every minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from bootstrap.contract.timings import SILENT
from infra.naming import Names
from infra.settings import StackSettings

# Longer than launching, booting and testing a replaced spot node takes.
MISSING_NODES_MINUTES = 45
# One failure is AWS throttling, and the next minute makes up for it.
CONTROLLER_ERRORS = 3
CONTROLLER_SILENT_MINUTES = SILENT // timedelta(minutes=1)
IDLE_MINUTES = 30
# A GPU that waits for data or another node still has a higher mean.
IDLE_GPU_PERCENT = 5
SPENT_SHARE = 0.8
SLOW_MINUTES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A CloudWatch metric, and the statistic of its samples within a period."""

    name: str
    namespace: str
    statistic: str
    dimensions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """An alarm: ``rings_after`` bad ones of ``periods`` ring it. A single metric needs no expression.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/using-metric-math.html
    """

    name: str
    description: str
    metrics: Mapping[str, Metric]
    expression: str = ""
    comparison: str = "GreaterThanThreshold"
    threshold: float = 0
    period_s: int = 300
    periods: int = 1
    rings_after: int = 0  # 0: all
    without_data: str = "notBreaching"


def alarms(settings: StackSettings, names: Names) -> list[Alarm]:
    """Every alarm of the stack; workers publish speeds of their own, and the alarm on spent dollars needs a ceiling."""

    def own(name: str, statistic: str) -> Metric:
        return Metric(name=name, namespace=names.metric_namespace, statistic=statistic)

    # A tick that Lambda has no capacity for is no error, and its event is dropped after a minute (infra/controller.py):
    # https://docs.aws.amazon.com/lambda/latest/dg/monitoring-metrics-types.html
    failed_runs = {
        name.lower(): Metric(
            name=name, namespace="AWS/Lambda", statistic="Sum", dimensions={"FunctionName": names.controller}
        )
        for name in ("Errors", "Throttles")
    }
    lost_events = Metric(
        name="ApproximateNumberOfMessagesVisible",
        namespace="AWS/SQS",
        statistic="Maximum",
        dimensions={"QueueName": names.dead_letter_queue},
    )

    every_alarm = [
        Alarm(
            name="missing-nodes",
            description=f"Fewer nodes in service than wanted for {MISSING_NODES_MINUTES} minutes",
            metrics={"wanted": own("NodesWanted", "Minimum"), "serving": own("NodesInService", "Maximum")},
            expression="wanted - serving",
            periods=MISSING_NODES_MINUTES // 5,
        ),
        Alarm(
            name="failed-launches",
            description="AWS launches no nodes for lack of quota, capacity or permission; `gpufleet status` says which",
            metrics={"failed": own("FailedLaunches", "Sum")},
            # A single refusal is normal on a spot market.
            periods=3,
            rings_after=2,
        ),
        Alarm(
            name="unfit-nodes",
            description="A node failed its set-up or its tests, and is replaced; the log group has its report",
            metrics={"unfit": own("UnfitNodes", "Sum")},
        ),
        Alarm(
            name="controller-errors",
            description=(
                f"The controller failed, or Lambda throttled it, in {CONTROLLER_ERRORS} of 5 minutes: the meter may "
                "stand still"
            ),
            metrics=failed_runs,
            # AWS publishes counts above 0 only.
            expression="FILL(errors, 0) + FILL(throttles, 0)",
            period_s=60,
            periods=5,
            rings_after=CONTROLLER_ERRORS,
        ),
        Alarm(
            name="controller-silent",
            description=f"No word of the controller for {CONTROLLER_SILENT_MINUTES} minutes: nothing holds the ceiling",
            # Published at the end of a tick; Lambda's count has failed ticks too.
            metrics={"measured": own("SpentUsd", "SampleCount")},
            comparison="LessThanThreshold",
            threshold=1,
            period_s=60,
            periods=CONTROLLER_SILENT_MINUTES,
            without_data="breaching",
        ),
        Alarm(
            name="idle-gpus",
            description=f"Nodes are paid and their GPUs below {IDLE_GPU_PERCENT}% for {IDLE_MINUTES} minutes",
            metrics={"serving": own("NodesInService", "Minimum"), "gpu": own("GpuUtilizationPercent", "Average")},
            # Nodes that publish nothing count as idle.
            expression=f"IF(serving > 0 AND FILL(gpu, 0) < {IDLE_GPU_PERCENT}, 1, 0)",
            periods=IDLE_MINUTES // 5,
        ),
        Alarm(name="lost-events", description="Node events that nobody could take", metrics={"lost": lost_events}),
    ]
    if settings.mode == "training":
        every_alarm.append(_slow(settings, own("TokensPerSecond", "Average")))
    if settings.ceiling_usd:
        every_alarm.append(
            Alarm(
                name="spent",
                description=(
                    f"{SPENT_SHARE:.0%} of the ceiling of {settings.ceiling_usd:,.2f} USD is spent; at the ceiling the "
                    "controller saves a checkpoint and ends the nodes"
                ),
                metrics={"spent": own("SpentUsd", "Maximum")},
                comparison="GreaterThanOrEqualToThreshold",
                threshold=round(SPENT_SHARE * settings.ceiling_usd, 2),
                period_s=60,
            )
        )
    return every_alarm


def _slow(settings: StackSettings, speed: Metric) -> Alarm:
    """Ring where training is slower than the 95th percentile of the plan's step time; restarts publish no speed."""
    plan, planned = settings.plan, settings.planned
    longer = plan.step_time_p95_s / plan.step_time_s
    hours, usd = planned.hours.expected, planned.cost_usd.expected
    threshold = plan.tokens_per_second / longer
    return Alarm(
        name="slow",
        description=(
            f"Training is slower than {threshold:,.0f} {'samples' if plan.job.seq_len == 1 else 'tokens'}/s, the "
            f"plan's p95, for {SLOW_MINUTES} minutes: the run takes more than {hours * longer:,.1f} h "
            f"({hours:,.1f} planned) and costs more than {usd * longer:,.2f} USD "
            f"({usd:,.2f} planned); `gpufleet status` says the date and the cost"
        ),
        metrics={"speed": speed},
        comparison="LessThanThreshold",
        threshold=round(threshold, 2),
        periods=SLOW_MINUTES // 5,
    )
