"""The stack's alarms as plain data. Metrics of the stack's namespace have no dimensions and come every minute."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

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


def _metric(name: str, namespace: str, statistic: str, **dimensions: str) -> dict[str, Any]:
    """A CloudWatch metric, and the statistic of its samples within a period."""
    return {"metric_name": name, "namespace": namespace, "stat": statistic, "dimensions": dimensions}


def _alarm(
    description: str,
    metrics: Mapping[str, dict[str, Any]],
    expression: str = "",
    *,
    period_s: int = 300,
    periods: int = 1,
    **others: Any,
) -> dict[str, Any]:
    """The provider's arguments of an alarm that rings above 0 in all ``periods``; a single metric has no expression.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/using-metric-math.html
    """
    queries: list[Any] = [
        {"id": name, "return_data": not expression, "metric": metric | {"period": period_s}}
        for name, metric in metrics.items()
    ]
    if expression:
        queries.append({"id": "result", "expression": expression, "label": "result", "return_data": True})
    return {
        "alarm_description": description,
        "metric_queries": queries,
        "evaluation_periods": periods,
        "datapoints_to_alarm": periods,
        "comparison_operator": "GreaterThanThreshold",
        "threshold": 0,
        "treat_missing_data": "notBreaching",
        **others,
    }


def alarms(settings: StackSettings, names: Names) -> dict[str, dict[str, Any]]:
    """Every alarm of the stack by name; workers publish speeds of their own, and spent dollars need a ceiling."""

    def own(name: str, statistic: str) -> dict[str, Any]:
        return _metric(name, names.metric_namespace, statistic)

    # A tick that Lambda has no capacity for is no error, and its event is dropped after a minute (infra/controller.py):
    # https://docs.aws.amazon.com/lambda/latest/dg/monitoring-metrics-types.html
    failed_runs = {
        name.lower(): _metric(name, "AWS/Lambda", "Sum", FunctionName=names.controller)
        for name in ("Errors", "Throttles")
    }
    found = {
        "missing-nodes": _alarm(
            f"Fewer nodes in service than wanted for {MISSING_NODES_MINUTES} minutes",
            {"wanted": own("NodesWanted", "Minimum"), "serving": own("NodesInService", "Maximum")},
            "wanted - serving",
            periods=MISSING_NODES_MINUTES // 5,
        ),
        "failed-launches": _alarm(
            "AWS launches no nodes for lack of quota, capacity or permission; `gpufleet status` says which",
            {"failed": own("FailedLaunches", "Sum")},
            # A single refusal is normal on a spot market.
            periods=3,
            datapoints_to_alarm=2,
        ),
        "unfit-nodes": _alarm(
            "A node failed its set-up or its tests, and is replaced; the log group has its report",
            {"unfit": own("UnfitNodes", "Sum")},
        ),
        "controller-errors": _alarm(
            f"The controller failed, or Lambda throttled it, in {CONTROLLER_ERRORS} of 5 minutes: the meter may stand "
            "still",
            failed_runs,
            # AWS publishes counts above 0 only.
            "FILL(errors, 0) + FILL(throttles, 0)",
            period_s=60,
            periods=5,
            datapoints_to_alarm=CONTROLLER_ERRORS,
        ),
        "controller-silent": _alarm(
            f"No word of the controller for {CONTROLLER_SILENT_MINUTES} minutes: nothing holds the ceiling",
            # Published at the end of a tick; Lambda's count has failed ticks too.
            {"measured": own("SpentUsd", "SampleCount")},
            comparison_operator="LessThanThreshold",
            threshold=1,
            period_s=60,
            periods=CONTROLLER_SILENT_MINUTES,
            treat_missing_data="breaching",
        ),
        "idle-gpus": _alarm(
            f"Nodes are paid and their GPUs below {IDLE_GPU_PERCENT}% for {IDLE_MINUTES} minutes",
            {"serving": own("NodesInService", "Minimum"), "gpu": own("GpuUtilizationPercent", "Average")},
            # Nodes that publish nothing count as idle.
            f"IF(serving > 0 AND FILL(gpu, 0) < {IDLE_GPU_PERCENT}, 1, 0)",
            periods=IDLE_MINUTES // 5,
        ),
    }
    if settings.mode == "training":
        found["slow"] = _slow(settings, own("TokensPerSecond", "Average"))
    if settings.ceiling_usd:
        found["spent"] = _alarm(
            f"{SPENT_SHARE:.0%} of the ceiling of {settings.ceiling_usd:,.2f} USD is spent; at the ceiling the "
            "controller saves a checkpoint and ends the nodes",
            {"spent": own("SpentUsd", "Maximum")},
            comparison_operator="GreaterThanOrEqualToThreshold",
            threshold=round(SPENT_SHARE * settings.ceiling_usd, 2),
            period_s=60,
        )
    return found


def _slow(settings: StackSettings, speed: dict[str, Any]) -> dict[str, Any]:
    """Ring where training is slower than the 95th percentile of the plan's step time; restarts publish no speed."""
    plan, planned = settings.plan, settings.planned
    longer = plan.step_time_p95_s / plan.step_time_s
    hours, usd = planned.hours.expected, planned.cost_usd.expected
    threshold = plan.tokens_per_second / longer
    return _alarm(
        f"Training is slower than {threshold:,.0f} {'samples' if plan.job.seq_len == 1 else 'tokens'}/s, the "
        f"plan's p95, for {SLOW_MINUTES} minutes: the run takes more than {hours * longer:,.1f} h "
        f"({hours:,.1f} planned) and costs more than {usd * longer:,.2f} USD "
        f"({usd:,.2f} planned); `gpufleet status` says the date and the cost",
        {"speed": speed},
        comparison_operator="LessThanThreshold",
        threshold=round(threshold, 2),
        periods=SLOW_MINUTES // 5,
    )
