"""Answers of ``gpufleet recommend`` in words: what decides, all plans, and why the others lose."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.words import counted
from optimizer.catalog.ttl import stale_lines
from optimizer.commands.output import format_number, say, wrap_line, wrap_note, write_table, write_text
from optimizer.contract.hardware import DERIVED_SPOT
from optimizer.contract.plan import Alternate, FleetPlan, Parallelism
from optimizer.contract.units import short, usd_text
from optimizer.recommend import Recommendation
from optimizer.search.advice import no_run
from optimizer.search.nearest import NearestPlan
from optimizer.search.reach import AXES
from optimizer.search.rejections import Rejection
from optimizer.training_code import TRAINER, other_code

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
ALTERNATE_COLUMNS = {
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
GROUP_COLUMNS = {"types": "types", "binding": "binds", "nearest": "nearest to the limit", "examples": "others"}
_UNITS = {"memory": "GiB a GPU", "budget": "USD", "deadline": "h", "capacity-block": "h"}
_EXAMPLES = 3
_INDENT = " " * 8  # below the names of describe_best's lines
# The short answer and its notes have ten lines in a terminal of 120 columns, in a narrower one so many plans beside the
# best all the same; a front has up to so many rows more.
_SHORT_LINES, _LEAST_SHOWN, _PARETO_SHOWN = 10, 1, 8
REJECTED_COLUMNS = {"instance_type": "type", "binding_constraint": "binds", "reason": "reason"}


def plan_rows(answer: Recommendation) -> list[dict[str, Any]]:
    """Return a row a plan, best first, with the published column names."""
    return [_row(rank, plan) for rank, plan in enumerate(answer.plans, start=1)]


def _row(rank: int, plan: FleetPlan) -> dict[str, Any]:
    split, memory = plan.parallelism, plan.memory
    p95_gib = memory.p95_gib or memory.peak_gib
    option = plan.purchase.in_short
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
        "usd": usd_in_table(plan),
        "price_stale": "yes" if plan.spot_range else "no",
        "cost_usd_dearest": plan.spot_range and plan.spot_range.cost_usd_dearest,
        "alternates": " ".join(
            f"{alternate.zone_id}/{alternate.instance_type}/{alternate.purchase}={alternate.cost_usd.expected:g}"
            for alternate in plan.alternates
        )
        or None,
    }


def usd_in_table(plan: FleetPlan) -> float | str:
    """Expected USD in the plan's own place, as its p95; with a ~ at an old spot price."""
    usd = plan.cost_usd.expected
    return f"~{format_number(usd)}" if plan.spot_range else usd


def print_all(answer: Recommendation) -> None:
    """Print every plan with its caveats and the reasons of rejected types."""
    if answer.plans:
        _write_plans(plan_rows(answer), title=f"Plans, best {answer.problem.request.objective} first")
        write_text(TABLE_KEY)
        _print_parallelism(answer)
        _print_caveats(answer)
    _print_nearest(answer)
    _print_rejections(answer)
    write_text(
        f"\n{answer.searched_plans:,} plans weighed in {answer.elapsed_s:.2f} s; on-demand prices as of "
        f"{answer.problem.catalog.as_of.isoformat()} or newer (gpufleet catalog show)"
    )


def print_explanation(answer: Recommendation) -> None:
    """Print where the best plan goes next, the layouts that its own was chosen over, and why each type is rejected."""
    if answer.plans and answer.plans[0].alternates:
        click.echo()
        rows = [_alternate(alternate) for alternate in answer.plans[0].alternates]
        write_table(rows, ALTERNATE_COLUMNS, title="Plan 1 goes next to, where its own place has no capacity")
    if answer.plans and (staging := answer.plans[0].staging):
        click.echo()
        write_text(f"Staging: {staging.describe(answer.plans[0].node_count)}; bound: {staging.source}.")
    if answer.plans and answer.plans[0].lustre:
        click.echo()
        write_text(f"Data: {answer.plans[0].lustre.describe()}.")
    if answer.alternatives:
        click.echo()
        write_table(
            [_alternative(entry) for entry in answer.alternatives],
            ALTERNATIVE_COLUMNS,
            title="Plan 1 was chosen over, on the same nodes",
            spare=("checkpointing", "peak_gib", "micro_batch"),
        )
    if answer.levers:
        say("\nLevers of plan 1")
        for lever in answer.levers:
            write_text(f"  {lever}", indent="    ")
    if answer.rejected:
        click.echo()
        rejected = [asdict(rejection) for rejection in answer.rejected]
        write_table(rejected, REJECTED_COLUMNS, title="Rejected types and the constraint that binds")


def print_brief(answer: Recommendation, *, more: bool, notes: Sequence[str]) -> None:
    """Print what decides: the best plan with its limits and evidence, the next ones, or the nearest without a plan.

    Args:
        answer: of the request.
        more: the explanation follows.
        notes: those that follow on standard error.
    """
    if not answer.plans:
        _print_nearest(answer)
        if more or not answer.nearest:
            _print_rejections(answer)
        return
    facts = describe_best(answer)
    for line in facts:
        write_text(line, indent=_INDENT)
    rows = plan_rows(answer)[1:]
    if answer.problem.request.objective == "pareto":
        rows = rows[:_PARETO_SHOWN]
    else:
        used = sum(len(wrap_line(line, indent=_INDENT)) for line in [*facts, _describe_hidden(answer, len(rows), more)])
        if sys.stderr.isatty():
            used += sum(len(wrap_note(note)) for note in notes)
        rows = rows[: max(_LEAST_SHOWN, _SHORT_LINES - used - 1)]  # one for the headings
    if rows:
        _write_plans(rows, tell_left_out=False)
    write_text(_describe_hidden(answer, len(rows), more), indent="  ")


def _describe_hidden(answer: Recommendation, shown: int, more: bool) -> str:
    rest = (
        (len(answer.plans) - 1 - shown, "more plan", ""),
        (len(answer.rejected), "type", " without one"),
        (len(stale_lines(answer.problem.catalog)), "kind", " of old data"),
    )
    hidden = [f"{counted(count, noun)}{more_words}" for count, noun, more_words in rest if count > 0]
    return f"{'--all' if more else '--all, --explain'}: {', '.join(hidden) or 'caveats'}"


def describe_best(answer: Recommendation) -> list[str]:
    """Describe plan 1: fleet, dollars and hours, limits, layout, evidence, and why it heads."""
    plan, limits = answer.plans[0], answer.problem.request.constraints
    memory, job, price = plan.memory, plan.job, plan.prices[0]
    row = _row(1, plan)
    p95_gib = memory.p95_gib or memory.peak_gib
    budget = "" if limits.budget_usd is None else f" (budget {limits.budget_usd:,.2f})"
    deadline = "" if limits.deadline_hours is None else f" (deadline {format_number(limits.deadline_hours)} h)"
    known = counted(plan.calibration.rows, "run") if plan.calibration.rows else no_run(job.precision)
    unit = "sample" if job.seq_len == 1 else "sequence"
    batch = "" if answer.problem.request.workload.global_batch else " (default)"
    lines = [
        f"{row['fleet']} ({plan.gpus} {plan.node.gpu}), {row['bought']}: "
        f"{'~' if plan.spot_range else ''}{plan.cost_usd.expected:,.2f} USD, {short(plan.hours.expected)} h expected",
        f"p95     {plan.cost_usd.p95:,.2f} USD{budget}, {short(plan.hours.p95)} h{deadline}",
        f"layout  {row['layout']}, {counted(job.steps, 'step')} of {counted(job.global_batch, unit)}{batch}, "
        f"{p95_gib:.3g} of {memory.limit_gib:.3g} GiB p95",
        f"known   {known} on {plan.node.gpu}, error {plan.calibration.relative_error:.0%}; price: {price.source}, "
        f"{price.as_of}",
    ]
    if plan.alternates:
        lines.append(f"next    without capacity there: {plan.describe_alternates(1)}")
    if outlook := plan.spot_policy:
        dollars = partial(usd_text, is_old=plan.spot_range is not None)
        others = [f"{name} {dollars(usd)}" for name, usd in outlook.expected_usd.items() if name != outlook.policy]
        compared = f" ({', '.join(others)})" if others else ""
        lines.append(f"policy  {outlook.policy}: {dollars(outlook.cost_usd.expected)} USD expected{compared}")
    lines += [f"data    {plan.staging.describe_briefly()}"] if plan.staging else []
    lines += [f"data    {plan.lustre.describe()}"] if plan.lustre else []
    if plan.beyond_trainer:
        lines.append(f"code    your own (docs/training.md): {'; '.join(plan.beyond_trainer)}")
    return lines


def _write_plans(rows: Sequence[Mapping[str, Any]], title: str = "", *, tell_left_out: bool = True) -> None:
    spare = ("micro_batches", "memory", "steps", "layout")
    write_table(rows, COLUMNS, title=title, spare=spare, tell_left_out=tell_left_out)


def _print_nearest(answer: Recommendation) -> None:
    if not answer.nearest:
        return
    rows = [_row(0, nearest.plan) | {"changes": describe_changes(nearest)} for nearest in answer.nearest]
    title = "No plan keeps the limits; the nearest with (a budget pays the drain too)"
    write_table(rows, NEAREST_COLUMNS, title=title, spare=("region", "hours_p95"))


def _print_rejections(answer: Recommendation) -> None:
    if answer.rejected:
        click.echo()
        rows = group_rejections(answer.rejected)
        write_table(
            rows, GROUP_COLUMNS, title="Types without a plan, by the constraint that binds", spare=("examples",)
        )
        write_text("--explain lists each type with its reason.")


def group_rejections(rejected: Sequence[Rejection]) -> list[dict[str, Any]]:
    """Return a row a constraint, the most types first: their number, the nearest to the limit, and examples."""
    groups: dict[str, list[Rejection]] = {}
    for rejection in rejected:
        groups.setdefault(rejection.binding_constraint, []).append(rejection)
    rows = []
    for binding, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        nearest, *others = sorted(members, key=_distance)
        unit = _UNITS.get(binding)
        reason = f"{nearest.instance_type}: {nearest.reason}"
        if unit and isinstance(nearest.value, float) and nearest.limit is not None:
            reason = f"{nearest.instance_type} needs {nearest.value:,.1f} {unit} of {nearest.limit:,.1f}"
        more = [f"{len(others) - _EXAMPLES} more"] * (len(others) > _EXAMPLES)
        examples = ", ".join([other.instance_type for other in others[:_EXAMPLES]] + more)
        rows.append({"types": len(members), "binding": binding, "nearest": reason, "examples": examples})
    return rows


def _distance(rejection: Rejection) -> float:
    value, limit = rejection.value, rejection.limit
    return value / limit if isinstance(value, float) and isinstance(limit, float) and limit else 0.0


def _print_caveats(answer: Recommendation) -> None:
    if unmeasured := sorted({plan.node.gpu for plan in answer.plans if not plan.calibration.rows}):
        write_text(
            f"No training run on {', '.join(unmeasured)} was measured: speed is pooled from other GPUs, p95 is wide."
        )
    derived = [rank for rank, plan in enumerate(answer.plans, start=1) if plan.prices[0].source == DERIVED_SPOT]
    if old := [plan for plan in answer.plans if plan.spot_range]:
        write_text(
            f"USD {usd_in_table(old[0])}: at an old spot price of the plan's own zone, as its p95, which has "
            "the spread of that age; "
            "--format json has the dearest zone's (spot_range)."
        )
    if derived:
        ranks = ", ".join(map(str, derived))
        write_text(f"plan {ranks}: the spot price is derived from the Spot Advisor's saving, not quoted.")


def _print_parallelism(answer: Recommendation) -> None:
    beyond = [(rank, plan) for rank, plan in enumerate(answer.plans, start=1) if plan.beyond_trainer]
    if beyond:
        ranks, first = ", ".join(str(rank) for rank, _ in beyond), beyond[0][1]
        which = "every plan" if len(beyond) == len(answer.plans) else f"plan{'s' * (len(beyond) > 1)} {ranks}"
        write_text(
            f"The reference trainer does not carry out {which}: {'; '.join(first.beyond_trainer)}. {other_code(first)}"
        )
    elif answer.problem.reach.only_trainers:
        write_text(
            f"The reference trainer ({TRAINER}) carries out every plan. --parallelism {','.join(AXES[:4])} and "
            "--framework also plan for other engines."
        )
    if answer.plans[0].parallelism.beyond_data:
        plain = [
            entry
            for entry in answer.alternatives
            if entry["parallelism"] and not Parallelism.model_validate(entry["parallelism"]).beyond_data
        ]
        if plain:
            write_text(
                f"Data parallelism alone on the nodes of plan 1: {plain[0]['why']} (--explain lists all that lost)."
            )


def describe_changes(nearest: NearestPlan) -> str:
    """The changes of a nearest plan as flags of ``recommend``: "--budget 81.77 --deadline 9.2"."""
    return " ".join(shlex.join(words) for words in nearest.flags.values())


def _alternate(alternate: Alternate) -> dict[str, Any]:
    spreads = {"hours": alternate.hours, "cost_usd": alternate.cost_usd}
    return {
        **{name: getattr(alternate, name) for name in ("zone_id", "instance_type", "purchase")},
        "price": alternate.price.usd,
        **{f"{key}_{name}": getattr(spread, name) for key, spread in spreads.items() for name in ("expected", "p95")},
    }


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


def old_price_note(plans: Sequence[FleetPlan], *, brief: bool = False) -> str:
    """Say what the best spot plan at an old price costs and what a refresh settles; empty where it is no cheaper."""
    number, plan = next(((i, plan) for i, plan in enumerate(plans, start=1) if plan.spot_range), (0, None))
    if plan is None or plan.spot_range is None:
        return ""
    first = plans[0]
    if plan is not first and plan.cost_usd.expected >= first.cost_usd.expected:
        return ""
    prices, cost = plan.spot_range, plan.cost_usd
    if brief:
        what = "none is current" if plan is first else "none is first"
        return f"spot prices (~) are {counted(prices.age_days, 'day')} old, {what}: --refresh reads today's"
    days = f"{counted(prices.age_days, 'day')} old (limit: {prices.limit_days})"
    place = f"in {plan.purchase.zone_id}" if plan.purchase.zone_id else f"in {plan.region}, derived"
    text = f"spot prices are {days}: plan {number} costs {cost.expected:,.2f} USD {place}"
    text += f" ({cost.p95:,.2f} at the 95th percentile, with the spread of that age)"
    if prices.zones > 1:
        text += f", {prices.cost_usd_dearest:,.2f} expected in the dearest of {prices.zones} zones"
    if first.spot_range:
        return f"{text}; no plan at a current price is within the request; a refresh settles the price and the zone"
    return (
        f"{text}; plan 1 ({first.purchase.option}) is first at a current price, {first.cost_usd.expected:,.2f} USD; a "
        "refresh settles whether spot is cheaper, and in which zone"
    )


def refresh_offer() -> str:
    """Say how to refresh, for this machine; IMDS is not asked, as that takes seconds where there is none."""
    environment = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials",
        os.environ.get("AWS_CONFIG_FILE") or Path.home() / ".aws" / "config",
    )
    # https://docs.aws.amazon.com/boto3/latest/guide/credentials.html
    if any(os.environ.get(name) for name in environment) or any(Path(file).is_file() for file in files):
        return "AWS credentials are at hand, --refresh reads today's"
    return "--refresh reads today's, with credentials"
