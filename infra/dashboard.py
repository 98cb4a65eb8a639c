"""The stack's CloudWatch dashboard, as plain data: measured values beside the plan's predictions.

https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html
"""

from __future__ import annotations

from typing import Any

from infra.naming import Names
from optimizer.contract.plan import FleetPlan, PolicyOutlook

Widget = dict[str, Any]

# CloudWatch's grid is 24 columns wide.
COLUMNS = 24
_WIDTH, _HEIGHT, _TEXT_HEIGHT = 8, 6, 4
# The metrics come once a minute.
PERIOD_S = 60
MIB_PER_GIB = 1024

_PREDICTED = "#2ca02c"
_LIMIT = "#d62728"


def body(
    plan: FleetPlan, names: Names, *, planned: FleetPlan | PolicyOutlook, ceiling_usd: float | None
) -> dict[str, Any]:
    """Body of the dashboard; ``planned`` are the hours and dollars under the stack's spot policy."""
    columns = COLUMNS // _WIDTH
    placed = [
        {**graph, "x": _WIDTH * (index % columns), "y": _TEXT_HEIGHT + _HEIGHT * (index // columns)}
        for index, graph in enumerate(_graphs(plan, names, planned, ceiling_usd))
    ]
    return {"start": "-PT12H", "periodOverride": "inherit", "widgets": [*_header(plan, names, planned), *placed]}


def _graphs(
    plan: FleetPlan, names: Names, planned: FleetPlan | PolicyOutlook, ceiling_usd: float | None
) -> list[Widget]:
    region, hourly = names.region, _hourly(planned)

    def own(metric: str, statistic: str = "Average", label: str = "") -> list[Any]:
        return [names.metric_namespace, metric, {"stat": statistic, **({"label": label} if label else {})}]

    memory, cost = plan.memory, planned.cost_usd
    # A CNN's tokens are its samples (FleetPlan.tokens_per_second).
    unit = "Tokens" if plan.job.seq_len > 1 else "Samples"
    # The controller publishes the events since its last tick.
    events = ("Interruptions", "RebalanceNotices", "FailedLaunches", "UnfitNodes")
    return [
        _graph(
            region,
            "GPU utilisation (%)",
            [own("GpuUtilizationPercent", "Minimum", "lowest GPU"), own("GpuUtilizationPercent")],
            top=100,
        ),
        _graph(
            region,
            "GPU memory, fullest GPU (GiB)",
            [*_gib(names, "GpuMemoryUsedMiB", "Maximum")],
            _line(f"predicted {memory.peak_gib:.1f}", memory.peak_gib, _PREDICTED),
            _line(f"limit {memory.limit_gib:.1f}", memory.limit_gib, _LIMIT),
        ),
        _graph(
            region,
            f"{unit} per second, whole fleet",
            [own("TokensPerSecond")],
            _line(f"predicted {plan.tokens_per_second:,.0f}", plan.tokens_per_second, _PREDICTED),
        ),
        _graph(
            region,
            "Dollars spent",
            [own("SpentUsd", "Maximum")],
            _line(f"expected {cost.expected:,.2f}", cost.expected, _PREDICTED),
            _line(f"95th percentile {cost.p95:,.2f}", cost.p95, "#ff7f0e"),
            *([_line(f"ceiling {ceiling_usd:,.2f}", ceiling_usd, _LIMIT)] if ceiling_usd else []),
        ),
        _graph(region, "Dollars per hour", [own("UsdPerHour")], _line(f"expected {hourly:,.2f}", hourly, _PREDICTED)),
        _graph(
            region,
            "Nodes",
            [own("NodesWanted"), own("NodesInService")],
            _line(f"plan {plan.node_count}", plan.node_count, _PREDICTED),
        ),
        _graph(region, "Interruptions and failures", [own(metric, "Sum") for metric in events]),
        _graph(
            region,
            "Node events waiting",
            [_waiting(names.queue, "to be read"), _waiting(names.dead_letter_queue, "lost")],
        ),
        _graph(
            region,
            "Controller",
            [
                ["AWS/Lambda", metric, "FunctionName", names.controller, {"stat": "Sum", "period": PERIOD_S}]
                for metric in ("Invocations", "Errors", "Throttles")
            ],
        ),
    ]


def _hourly(planned: FleetPlan | PolicyOutlook) -> float:
    return planned.cost_usd.expected / planned.hours.expected


def _header(plan: FleetPlan, names: Names, planned: FleetPlan | PolicyOutlook) -> list[Widget]:
    text = (
        f"## gpufleet {names.stack}\n"
        f"{plan.job.model} on {plan.node_count} x {plan.instance_type}, {plan.purchase.in_short}. Predicted: "
        f"{planned.hours.expected:,.1f} h (95th percentile {planned.hours.p95:,.1f} h), "
        f"{planned.cost_usd.expected:,.2f} USD ({planned.cost_usd.p95:,.2f}), {_hourly(planned):,.2f} USD per hour, "
        f"{plan.interruption.expected_count:,.2f} interruptions.\n\n"
        f"Speed is {plan.calibration.source}, standard error {plan.calibration.relative_error:.0%}."
    )
    shares = {
        "title": "Actual as a share of predicted (%)",
        "view": "singleValue",
        "region": names.region,
        "period": PERIOD_S,
        "metrics": [
            *_share(names, "speed", "TokensPerSecond", "Average", plan.tokens_per_second),
            *_share(names, "memory", "GpuMemoryUsedMiB", "Maximum", plan.memory.peak_gib * MIB_PER_GIB),
            *_share(names, "dollars", "SpentUsd", "Maximum", planned.cost_usd.expected),
        ],
    }
    half = {"y": 0, "width": COLUMNS // 2, "height": _TEXT_HEIGHT}
    return [
        {"type": "text", "x": 0, **half, "properties": {"markdown": text}},
        {"type": "metric", "x": COLUMNS // 2, **half, "properties": shares},
    ]


def _share(names: Names, label: str, metric: str, statistic: str, predicted: float) -> list[list[Any]]:
    raw = f"{label}_raw"
    return [
        [{"expression": f"100 * {raw} / {predicted:.10g}", "label": label, "id": label}],
        [names.metric_namespace, metric, {"id": raw, "stat": statistic, "visible": False}],
    ]


def _gib(names: Names, metric: str, statistic: str) -> list[list[Any]]:
    return [
        [{"expression": f"raw / {MIB_PER_GIB}", "label": "fullest GPU", "id": "gib"}],
        [names.metric_namespace, metric, {"id": "raw", "stat": statistic, "visible": False}],
    ]


def _waiting(queue: str, label: str) -> list[Any]:
    name = "ApproximateNumberOfMessagesVisible"
    return ["AWS/SQS", name, "QueueName", queue, {"stat": "Maximum", "period": 300, "label": label}]


def _line(label: str, value: float, color: str) -> dict[str, Any]:
    return {"label": label, "value": value, "color": color}


def _graph(
    region: str, title: str, metrics: list[list[Any]], *lines: dict[str, Any], top: float | None = None
) -> Widget:
    return {
        "type": "metric",
        "width": _WIDTH,
        "height": _HEIGHT,
        "properties": {
            "title": title,
            "view": "timeSeries",
            "stacked": False,
            "region": region,
            "period": PERIOD_S,
            "metrics": metrics,
            "yAxis": {"left": {"min": 0, **({"max": top} if top else {})}},
            **({"annotations": {"horizontal": list(lines)}} if lines else {}),
        },
    }
