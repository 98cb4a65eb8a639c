"""Numbers of a report that are worked out from a plan: bars, hours by cause, intervals, grouped rejections."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.contract.plan import FleetPlan, Spread
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.report.answer import ReportAnswer


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A part of a whole: ``percent`` is its share, ``length_percent`` its bar's against the longest."""

    name: str
    shown: str
    percent: float
    length_percent: float


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """A spread against its limit and what a run took, in percent of the scale's length."""

    start: float
    expected: float
    end: float
    limit: float | None
    actual: float | None


# A limit that is so many times what it limits is off the scale.
FAR = 12.0

# Labels of JSON keys whose plain reading misleads.
LABELS = {
    "transfer": "VPC endpoints, data from afar",
    "head_node": "controller",
    "compute": "GPU nodes",
    "volumes": "EBS volumes",
    "storage": "checkpoints in S3",
    "head": "output layer",
    "host": "waiting for the host",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
}


def bars(parts: Mapping[str, float], *, decimals: int | None = None) -> list[Bar]:
    """Return the parts above 0, the largest first, by default with the decimals of three digits of the whole."""
    total, longest = sum(parts.values()), max(parts.values(), default=0.0)
    if decimals is None:
        decimals = max(0, 2 - math.floor(math.log10(total)))
    least = 10.0**-decimals
    return [
        Bar(
            name=LABELS.get(name, name.replace("_", " ")),
            shown=f"{value:,.{decimals}f}" if value >= least / 2 else f"<{least:g}",
            percent=100 * value / total,
            length_percent=100 * value / longest,
        )
        for name, value in sorted(parts.items(), key=lambda part: -part[1])
        if value > 0
    ]


def gauge(spread: Spread, limit: float | None, actual: float | None = None) -> Gauge:
    """Place a spread, its limit and what a run took on a scale from 0; a limit far beyond the others is off it."""
    most = max(spread.p95, actual or 0.0)
    shown = limit if limit is not None and limit <= FAR * most else None
    length = 1.08 * max(most, shown or 0.0) or 1.0

    def place(value: float) -> float:
        return round(100 * value / length, 2)

    return Gauge(
        start=place(spread.p50),
        expected=place(spread.expected),
        end=place(spread.p95),
        limit=None if shown is None else place(shown),
        actual=None if actual is None else place(actual),
    )


def usd_by_item(plan: FleetPlan) -> dict[str, float]:
    """Split the expected dollars; a file system for the data is a part of its own."""
    parts = plan.cost_usd.breakdown.model_dump()
    if plan.lustre:
        parts |= {"storage": parts["storage"] - plan.lustre.usd, "FSx for Lustre": plan.lustre.usd}
    return parts


def hours_by_cause(plan: FleetPlan) -> dict[str, float]:
    """Split the expected hours; the parts add up to them (docs/economics.md)."""
    training = plan.job.steps * plan.step_time_s / 3600
    useful = plan.hours.expected - plan.interruption.lost_hours
    stalls = useful * plan.interruption.checkpoint_stall_s / plan.interruption.checkpoint_interval_s
    staging = plan.staging.hours if plan.staging else 0.0
    interruptions = plan.interruption.lost_hours - RESTART_HOURS - stalls - staging
    return {
        "training steps": training,
        "allowance for the error of the speed": max(0.0, useful - training),
        "start of the nodes": RESTART_HOURS,
        **({"copies of the data": staging} if staging else {}),
        "stalls for checkpoints": stalls,
        "interruptions": max(0.0, interruptions),
    }


def plan_commands(answer: ReportAnswer, origin: str) -> list[tuple[str, str]]:
    """Return the commands to go on with from a plan, each with its purpose; ``origin`` is the plan's file, or -."""
    file = shlex.quote("plans.json" if origin == "-" else origin)
    words = file if answer.number == 1 else f"{file} --plan {answer.number}"
    return [
        ("See every resource and its cost an hour; nothing is created", f"gpufleet preview {words}"),
        ("Check, create and watch it, with a question before it costs anything", f"gpufleet up {words} --stack demo"),
    ]


def stack_commands(stack: str) -> list[tuple[str, str]]:
    """Return the commands to go on with from a deployed stack, each with its purpose."""
    name = shlex.quote(stack)
    return [
        ("See it now: nodes, progress, dollars, forecast", f"gpufleet status --stack {name}"),
        ("Compare with the bill, by tag", f"gpufleet costs --stack {name}"),
        ("Save a checkpoint and end all nodes", f"gpufleet stop --stack {name}"),
        ("End every hourly cost; checkpoints and their key stay", f"pulumi destroy --exclude-protected --stack {name}"),
    ]
