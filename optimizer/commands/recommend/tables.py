"""Tables of ``gpufleet recommend``: plans, alternatives, mixed fleets and rejected types."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from optimizer.commands.output import write_table
from optimizer.hardware import DERIVED_SPOT
from optimizer.plan import FleetPlan, Parallelism
from optimizer.recommend import Recommendation
from optimizer.search.nearest import NearestPlan
from optimizer.search.reach import AXES
from optimizer.training_code import TRAINER, other_code

# Columns of --format csv; additions come last.
CSV_COLUMNS = (
    "rank", "instance_type", "region", "node_count", "gpus", "option", "parallelism", "sharding", "micro_batch",
    "global_batch", "mfu", "hours_expected", "hours_p95", "cost_usd_expected", "cost_usd_p95", "measured_rows",
    "price_source", "price_as_of", "grad_accum", "activation_checkpointing", "steps", "memory_p95_gib",
    "memory_limit_gib", "zone_id", "price_stale", "cost_usd_dearest",
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
    "GPU and its limit."
)
_RECOMPUTED = {"none": "", "selective": " sel", "full": " full"}
ALTERNATIVE_COLUMNS = {
    "parallelism": "parallelism",
    "sharding": "sharding",
    "micro_batch": "micro",
    "checkpointing": "checkpointing",
    "peak_gib": "GiB",
    "step_time_s": "step s",
    "cost_usd_expected": "USD",
    "why": "why it loses",
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


def plan_rows(answer: Recommendation) -> list[dict[str, Any]]:
    """Return a row a plan, best first, with the published column names."""
    return [_row(rank, plan) for rank, plan in enumerate(answer.plans, start=1)]


def _row(rank: int, plan: FleetPlan) -> dict[str, Any]:
    base, split, memory = plan.purchase.on_demand_base, plan.parallelism, plan.memory
    p95_gib = memory.p95_gib or memory.peak_gib
    option = plan.purchase.option + (f" (+{base} on-demand)" if base else "")
    return {
        "rank": rank,
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
        "usd": _usd(plan),
        "price_stale": "yes" if plan.spot_range else "no",
        "cost_usd_dearest": plan.spot_range and plan.spot_range.cost_usd_dearest,
    }


def _usd(plan: FleetPlan) -> float | str:
    """Expected USD; from the cheapest to the dearest zone where the spot prices are old."""
    low, old = plan.cost_usd.expected, plan.spot_range
    if old is None or old.cost_usd_dearest <= low:
        return low
    digits = 0 if low >= 10 else 2
    return f"{low:,.{digits}f}-{old.cost_usd_dearest:,.{digits}f}"


def print_tables(answer: Recommendation, *, explain: bool) -> None:
    """Print plans, mixed fleets and rejected types, each with its caveats."""
    if answer.plans:
        write_table(plan_rows(answer), COLUMNS, title=f"Plans, best {answer.problem.request.objective} first")
        click.echo(TABLE_KEY)
        _print_parallelism(answer, explain=explain)
        _print_caveats(answer)
    if answer.nearest:
        rows = [_row(0, nearest.plan) | {"changes": describe_changes(nearest)} for nearest in answer.nearest]
        write_table(
            rows, NEAREST_COLUMNS, title="No plan keeps the limits; the nearest with (a budget pays the drain too)"
        )
    if answer.mixed_fleets:
        from optimizer.mixed.describe import NOT_PROVISIONED, summarise

        verdict = "Cheaper" if answer.plans else "Within the limits"
        click.echo(f"\n{verdict} as a mixed fleet, two groups of nodes in one job:")
        for fleet in answer.mixed_fleets:
            click.echo(f"  {summarise(fleet)}")
        click.echo(f"  {NOT_PROVISIONED}; --format json has shares and prices, docs/mixed.md what is assumed.")
    if answer.rejected:
        click.echo()
        rejected = [asdict(rejection) for rejection in answer.rejected]
        write_table(rejected, REJECTED_COLUMNS, title="Rejected types and the constraint that binds")
    click.echo(
        f"\n{answer.searched_plans:,} plans weighed in {answer.elapsed_s:.2f} s; on-demand prices as of "
        f"{answer.problem.catalog.as_of.isoformat()} or newer (gpufleet catalog show)"
    )


def _print_caveats(answer: Recommendation) -> None:
    if why := answer.plans[0].passed_over:
        click.echo(f"plan 1 was chosen over a tie: {why}.")
    if unmeasured := sorted({plan.node.gpu for plan in answer.plans if not plan.calibration.rows}):
        click.echo(
            f"No training run on {', '.join(unmeasured)} was measured: speed is pooled from other GPUs, p95 is wide."
        )
    derived = [rank for rank, plan in enumerate(answer.plans, start=1) if plan.prices[0].source == DERIVED_SPOT]
    if any(plan.spot_range for plan in answer.plans):
        click.echo("USD 76-244: an old spot price, in the cheapest and the dearest zone; the plan is for the cheapest.")
    if derived:
        ranks = ", ".join(map(str, derived))
        click.echo(f"plan {ranks}: the spot price is derived from the Spot Advisor's saving, not quoted.")


def _print_parallelism(answer: Recommendation, *, explain: bool) -> None:
    beyond = [(rank, plan) for rank, plan in enumerate(answer.plans, start=1) if plan.beyond_trainer]
    if beyond:
        ranks, first = ", ".join(str(rank) for rank, _ in beyond), beyond[0][1]
        which = "every plan" if len(beyond) == len(answer.plans) else f"plan{'s' * (len(beyond) > 1)} {ranks}"
        click.echo(
            f"The reference trainer does not carry out {which}: {'; '.join(first.beyond_trainer)}. {other_code(first)}"
        )
    elif answer.problem.reach.only_trainers:
        click.echo(
            f"The reference trainer ({TRAINER}) carries out every plan. --parallelism {','.join(AXES[:4])} and "
            "--framework also plan for other engines."
        )
    if explain:
        click.echo()
        write_table(
            [_alternative(entry) for entry in answer.alternatives],
            ALTERNATIVE_COLUMNS,
            title="Plan 1 was chosen over, on the same nodes",
        )
    elif answer.plans[0].parallelism.beyond_data:
        plain = [
            entry
            for entry in answer.alternatives
            if entry["parallelism"] and not Parallelism.model_validate(entry["parallelism"]).beyond_data
        ]
        if plain:
            click.echo(
                f"Data parallelism alone on the nodes of plan 1: {plain[0]['why']} (--explain lists all that lost)."
            )


def describe_changes(nearest: NearestPlan) -> str:
    """The changes of a nearest plan as flags of ``recommend``: "--budget 81.77 --deadline 9.2"."""
    return " ".join(shlex.join(words) for words in nearest.flags.values())


def _alternative(entry: Mapping[str, Any]) -> dict[str, Any]:
    split = entry["parallelism"]
    if split is None:
        return dict(entry)
    return {
        **entry,
        "parallelism": Parallelism.model_validate(split).in_short,
        "sharding": split["sharding"],
        "micro_batch": split["micro_batch"],
        "checkpointing": split["activation_checkpointing"],
    }


def count_rejections(answer: Recommendation) -> str:
    """Count the rejected types of each constraint: "2 budget, 3 memory"."""
    counts = Counter(rejection.binding_constraint for rejection in answer.rejected)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
