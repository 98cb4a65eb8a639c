"""Numbers of a report that are worked out from a plan: bars, hours by cause, intervals, grouped rejections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.contract.plan import FleetPlan
from optimizer.economics.interruption import RESTART_HOURS


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A part of a whole: ``percent`` is its share, ``length_percent`` its bar's against the longest."""

    name: str
    shown: str
    percent: float
    length_percent: float


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
    gaps = plan.hours.expected - plan.hours_with_nodes.expected
    interruptions = plan.interruption.lost_hours - RESTART_HOURS - stalls - staging - gaps
    return {
        "training steps": training,
        "allowance for the error of the speed": max(0.0, useful - training),
        "start of the nodes": RESTART_HOURS,
        **({"copies of the data": staging} if staging else {}),
        **({"gaps between Capacity Blocks": gaps} if gaps else {}),
        "stalls for checkpoints": stalls,
        "interruptions": max(0.0, interruptions),
    }
