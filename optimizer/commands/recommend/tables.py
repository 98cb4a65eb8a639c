"""Answers of ``gpufleet recommend`` in words: the lines that a buyer reads, and the tables behind --explain."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from bootstrap.contract.words import counted
from optimizer.commands.output import format_number, say, write_table, write_text
from optimizer.contract.hardware import DERIVED_SPOT
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import usd_text
from optimizer.recommend import Recommendation
from optimizer.search.problem import Rejection
from optimizer.training_code import describe_demands

# Columns of --format csv; additions come last.
CSV_COLUMNS = (
    "rank", "instance_type", "region", "node_count", "gpus", "option", "parallelism", "sharding", "micro_batch",
    "global_batch", "mfu", "hours_expected", "hours_p95", "cost_usd_expected", "cost_usd_p95", "measured_rows",
    "price_source", "price_as_of", "grad_accum", "activation_checkpointing", "steps", "memory_p95_gib",
    "memory_limit_gib", "zone_id", "price_stale", "cost_usd_dearest", "alternates",
)  # fmt: skip
# Columns of the table, within 120 characters: several fields share one.
COLUMNS = {
    "rank": "#",
    "fleet": "nodes x type",
    "bought": "purchase",
    "layout": "layout",
    "micro_batches": "micro-batch",
    "memory": "p95 GiB",
    "steps": "steps",
    "hours_expected": "hours",
    "hours_p95": "p95",
    "usd": "USD",
    "cost_usd_p95": "p95",
}
TABLE_KEY = (
    "micro-batch 2x30 full: 2 samples, 30 times a step, activations recomputed (sel: selectively). p95 GiB: peak of a "
    "GPU and its limit. ~: at an old spot price of the plan's own zone; its p95 has the spread of that age."
)
_RECOMPUTED = {"none": "", "selective": " sel", "full": " full"}
PLACE_COLUMNS = {
    "zone_id": "zone",
    "instance_type": "type",
    "purchase": "purchase",
    "price": "USD/h a node",
    "hours_expected": "hours",
    "hours_p95": "p95",
    "cost_usd_expected": "USD",
    "cost_usd_p95": "p95",
}
NEAREST_COLUMNS = {
    "changes": "with",
    "instance_type": "type",
    "region": "region",
    "node_count": "nodes",
    "option": "purchase",
    "hours_p95": "p95 h",
    "cost_usd_p95": "p95 USD",
}
REJECTED_COLUMNS = {"instance_type": "type", "binding_constraint": "binds", "reason": "reason"}
# Rejected types that an answer without any plan lists.
_REJECTED_SHOWN = 5
_INDENT = " " * 9  # below the names of the lines
_NOTHING = "nothing at a current price within the limits"
# Hours from which a duration is in days.
_DAYS_FROM_HOURS = 72


def plan_rows(answer: Recommendation) -> list[dict[str, Any]]:
    """Return a row a plan, best first, with the published column names."""
    return [{"rank": rank} | plan_row(plan) for rank, plan in enumerate(answer.plans, start=1)]


def plan_row(plan: FleetPlan) -> dict[str, Any]:
    """Return a plan's columns: the published ones, and those of tables, which join several."""
    split, memory, option = plan.parallelism, plan.memory, plan.purchase.in_short
    p95_gib = memory.p95_gib
    return {
        "instance_type": plan.instance_type,
        "region": plan.region,
        "node_count": plan.node_count,
        "gpus": plan.gpus,
        "fleet": f"{plan.node_count} x {plan.instance_type}",
        "option": option,
        "bought": f"{option} {plan.purchase.zone_id or plan.region}",
        "parallelism": split.in_short,
        "sharding": split.sharding,
        "layout": f"{split.in_short} {split.sharding}" if split.data > 1 else split.in_short,
        "micro_batch": split.micro_batch,
        "grad_accum": split.grad_accum,
        "micro_batches": f"{split.micro_batch}x{split.grad_accum}{_RECOMPUTED[split.activation_checkpointing]}",
        "activation_checkpointing": split.activation_checkpointing,
        "memory_p95_gib": p95_gib,
        "memory_limit_gib": memory.limit_gib,
        "memory": f"{p95_gib:.0f}/{memory.limit_gib:.0f}" if p95_gib >= 10 else f"{p95_gib:.1f}/{memory.limit_gib:.1f}",
        "global_batch": plan.job.global_batch,
        "steps": plan.job.steps,
        "mfu": plan.mfu,
        "hours_expected": plan.hours.expected,
        "hours_p95": plan.hours.p95,
        "cost_usd_expected": plan.cost_usd.expected,
        "cost_usd_p95": plan.cost_usd.p95,
        "measured_rows": plan.calibration.rows,
        "price_source": plan.prices[0].source,
        "price_as_of": plan.prices[0].as_of.isoformat(),
        "zone_id": plan.purchase.zone_id,
        "usd": f"~{format_number(plan.cost_usd.expected)}" if plan.spot_range else plan.cost_usd.expected,
        "price_stale": "yes" if plan.spot_range else "no",
        "cost_usd_dearest": plan.spot_range and plan.spot_range.cost_usd_dearest,
        "alternates": " ".join(
            f"{alternate.zone_id}/{alternate.instance_type}/{alternate.purchase}={alternate.cost_usd.expected:g}"
            for alternate in plan.alternates
        )
        or None,
    }


def print_answer(answer: Recommendation, next_step: str, *, explain: bool) -> None:
    """Print what a buyer decides by, or the nearest plans where there is none; ``explain`` adds everything else."""
    if answer.plans:
        plan = answer.plans[0]
        lines = {
            "Buy": _describe_purchase(plan, is_first=True),
            "Faster": _describe_purchase(answer.faster) if answer.faster else _NOTHING,
            "Cheaper": _describe_purchase(answer.cheaper) if answer.cheaper else _NOTHING,
            "Spot": describe_spot(answer.plans),
            "Fits": _describe_needs(plan),
            "Next": next_step,
        }
        for name, text in lines.items():
            if text:
                write_text(f"{name:<8} {text}", indent=_INDENT)
    elif answer.nearest:
        # The changes are flags of ``recommend``: "--budget 81.77 --deadline 9.2".
        changes = [" ".join(map(shlex.join, nearest.flags.values())) for nearest in answer.nearest]
        rows = [plan_row(near.plan) | {"changes": text} for near, text in zip(answer.nearest, changes, strict=True)]
        title = "No plan keeps the limits; the nearest with (a budget pays the drain too)"
        write_table(rows, NEAREST_COLUMNS, title=title, spare=("region", "hours_p95"))
    if explain:
        _print_explanation(answer)
    elif not answer.plans and not answer.nearest:
        _print_rejections(answer.rejected[:_REJECTED_SHOWN], "Some of the rejected types")


def _describe_purchase(plan: FleetPlan, *, is_first: bool = False) -> str:
    """Describe purchase, place, dollars and hours; only a GPU with measured runs gets words that promise a bound."""
    purchase, cost, hours = plan.purchase, plan.cost_usd, plan.hours
    usd, bound = f"{'~' if plan.spot_range else ''}{_usd(cost.expected)} USD", f"under {_usd(cost.p95)} USD"
    # The source says so too where the GPU's runs are of other models, layouts or methods.
    is_measured = plan.calibration.rows > 0 and "no measured run" not in plan.calibration.source
    surely = ("19 in 20 " if is_measured else "estimated ") if is_first or not is_measured else ""
    return (
        f"{plan.node_count} x {plan.instance_type} ({plan.gpus} {plan.node.gpu}), "
        f"{purchase.in_short.replace('on-demand', 'on demand')}, {purchase.zone_id or plan.region}: {usd}, "
        f"{_duration(hours.expected)}; {surely}{bound}, {_duration(hours.p95)}"
    )


def _usd(usd: float) -> str:
    """Dollars rounded up, so that a bound stays one: whole ones from ten on."""
    return f"{math.ceil(usd):,}" if usd >= 10 else f"{math.ceil(usd * 100 - 1e-6) / 100:.2f}"


def _duration(hours: float) -> str:
    """Return minutes, hours or days, rounded up."""
    if hours < 1:
        return f"{math.ceil(60 * hours)} min"
    amount, unit = (hours / 24, "days") if hours > _DAYS_FROM_HOURS else (hours, "h")
    return f"{math.ceil(10 * amount - 1e-6) / 10:,g} {unit}"


def describe_spot(plans: Sequence[FleetPlan]) -> str:
    """Say what spot costs or may save, and what settles that; empty where spot is not asked for or saves nothing."""
    first = plans[0]
    cheaper = (plan for plan in plans if plan.spot_range and plan.cost_usd.expected < first.cost_usd.expected)
    old = first if first.spot_range else next(cheaper, None)
    if old and old.spot_range:
        origin = "Spot Advisor prices" if old.prices[0].source == DERIVED_SPOT else "prices"
        text = f"{origin} {counted(old.spot_range.age_days, 'day')} old: add --refresh"
        if old is not first:
            usd = f"{_usd(old.cost_usd.expected)} to {_usd(old.cost_usd.p95)} USD"
            return f"{old.node_count} x {old.instance_type} perhaps {usd}, {_duration(old.hours.expected)}; {text}"
    elif first.purchase.option == "spot":
        price, stops = first.prices[0], first.interruption.expected_count
        text = f"{price.usd:,.2f} USD an hour a node on {price.as_of}; {stops:.2g} interruptions expected"
    else:
        return ""
    for place in first.alternates[:1]:
        name = "" if place.instance_type == first.instance_type else f"{place.instance_type} "
        usd = usd_text(place.cost_usd.expected, is_old=first.is_old(place))
        more = f", {len(first.alternates) - 1} more" if len(first.alternates) > 1 else ""
        text += f"; else {name}{place.purchase} in {place.zone_id} ({usd} USD){more}"
    if outlook := first.spot_policy:
        text += f"; {outlook.policy}: {usd_text(outlook.cost_usd.expected, is_old=old is first)} USD"
    return text


def _describe_needs(plan: FleetPlan) -> str:
    """Say how much of a GPU's memory is used, and what the account needs."""
    memory, purchase, letter = plan.memory, plan.purchase, plan.instance_type[0].upper()
    fits = f"{memory.p95_gib:.3g} of {memory.limit_gib:.3g} GiB a GPU"
    spot = plan.node_count - purchase.on_demand_nodes if purchase.option == "spot" else 0
    bought = purchase.on_demand_nodes if purchase.capacity_reservation_id or spot else plan.node_count
    # Quotas count vCPUs by the first letter of the type, and spot ones of P types by its generation as well:
    # https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
    needs = [f"{bought * plan.node.vcpus:,} vCPUs of AWS's {letter} quota"] if bought else []
    group = plan.instance_type[:2].upper() if letter == "P" else letter
    needs += [f"{spot * plan.node.vcpus:,} vCPUs of AWS's {group} spot quota"] if spot else []
    if not needs:
        return f"{fits}; needs only what is reserved"
    # AWS offers Capacity Blocks for types whose capacity is scarce:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
    rare = "; rare: gpufleet blocks find" if letter == "P" else ""
    return f"{fits}; needs {' and '.join(needs)} in {plan.region}{rare}"


def _print_explanation(answer: Recommendation) -> None:
    """Print every plan, the evidence of the first, where it goes next, and all rejections."""
    if answer.plans:
        plan = answer.plans[0]
        click.echo()
        title = f"Plans, best {answer.problem.request.objective} first"
        write_table(plan_rows(answer), COLUMNS, title=title, spare=("micro_batches", "memory", "steps", "layout"))
        write_text(TABLE_KEY)
        unmeasured = sorted({plan.node.gpu for plan in answer.plans if not plan.calibration.rows})
        if unmeasured:
            write_text(f"No training run on {', '.join(unmeasured)} was measured: p95 is wide.")
        derived = [str(rank) for rank, plan in enumerate(answer.plans, 1) if plan.prices[0].source == DERIVED_SPOT]
        if derived:
            write_text(f"Spot prices derived from the Spot Advisor's saving, not quoted: plan {', '.join(derived)}.")
        say("\nPlan 1")
        evidence = [f"speed: {plan.calibration.source}; error {plan.calibration.relative_error:.0%}"]
        evidence += [f"{p.item}: {p.usd:g} USD/h, {p.source}, {p.as_of}" for p in plan.prices if p.node]
        evidence += [describe_demands(plan), plan.spot_policy.describe() if plan.spot_policy else ""]
        evidence += [f"staging: {s.describe(plan.node_count)}; {s.source}" for s in (plan.staging,) if s]
        evidence += [f"data: {plan.lustre.describe()}"] if plan.lustre else []
        for line in filter(None, evidence):
            write_text(f"  {line}", indent="    ")
        write_places(plan)
    _print_rejections(answer.rejected, "Rejected types and the constraint that binds")
    write_text(
        f"\n{answer.searched_plans:,} plans weighed in {answer.elapsed_s:.2f} s; on-demand prices as of "
        f"{answer.problem.catalog.as_of.isoformat()} or newer (gpufleet catalog show)"
    )


def _print_rejections(rejected: Sequence[Rejection], title: str) -> None:
    if rejected:
        click.echo()
        write_table([asdict(rejection) for rejection in rejected], REJECTED_COLUMNS, title=title)


def write_places(plan: FleetPlan) -> None:
    """Print the plan's own place, and those that its nodes go to where AWS has no capacity there, if any."""
    if not plan.alternates:
        return
    click.echo()
    own = (plan.purchase.zone_id or plan.region, plan.instance_type, plan.purchase.in_short, plan.prices[0].usd)
    places = [(*own, plan.hours, plan.cost_usd)]
    places += [(a.zone_id, a.instance_type, a.purchase, a.price.usd, a.hours, a.cost_usd) for a in plan.alternates]
    rows = [
        dict(zip(PLACE_COLUMNS, (*facts, hours.expected, hours.p95, usd.expected, usd.p95), strict=True))
        for *facts, hours, usd in places
    ]
    write_table(rows, PLACE_COLUMNS, title="The plan's place, and the next ones where it has no capacity")


def count_rejections(answer: Recommendation) -> str:
    """Count the rejected types of each constraint: "2 budget, 3 memory"."""
    counts = Counter(rejection.binding_constraint for rejection in answer.rejected)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
