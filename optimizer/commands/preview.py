"""``gpufleet preview``: what a plan would create, change and cost, without an account or the Pulumi CLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.output import format_option, write_csv, write_json, write_table
from optimizer.commands.stack import read_plan_argument
from optimizer.errors import InvalidInputError
from optimizer.plan import DERIVED_SPOT, SCHEMA_VERSION, FleetPlan
from optimizer.units import HOURS_PER_MONTH

if TYPE_CHECKING:
    from infra.preview import Known, Resource
    from optimizer.catalog import Catalog
    from optimizer.commands.preview_cost import Line, Totals
    from optimizer.commands.preview_diff import Before, Change

NOTES = (
    "The dollars of the run are the plan's: compute, volumes, checkpoints kept, endpoints and the controller. "
    "The table by resource has what they cost by the hour at list prices, without free allowances, taxes and traffic "
    'to other regions; "usage" is a unit price of what nobody knows before, and not in the totals.',
    "Protected resources hold the checkpoints: `pulumi destroy` refuses until gpufleet:forceDestroy is true; "
    "`pulumi destroy --exclude-protected` ends all hourly cost and keeps them.",
)
RESOURCE_COLUMNS = ("type", "name", "parent", "protected", "detail", "usd_per_hour", "usd_per_month")


@click.command(
    epilog="""\b
Example:
  gpufleet recommend request.yaml --format json > plans.json
  gpufleet preview plans.json
  gpufleet preview plans.json --plan 2 --format json
  gpufleet preview plans.json --config nat=true --config alarmEmail=ops@example.com
  gpufleet preview plans.json --stack dev --against Pulumi.dev.yaml
  pulumi stack export --stack dev > dev.json && gpufleet preview plans.json --stack dev --against dev.json
"""
)
@click.argument("plan")
@click.option(
    "--plan", "plan_number", type=click.IntRange(min=1), default=1, show_default=True, help="Which plan of PLAN."
)
@click.option("--stack", default="dev", show_default=True, metavar="NAME", help="Stack name to preview under.")
@click.option(
    "--config",
    "config_entries",
    multiple=True,
    metavar="KEY=VALUE",
    help="A configuration key of the stack (Pulumi.yaml), lists and objects as JSON; repeatable.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What to compare with: a plan, recommend's JSON, a Pulumi.NAME.yaml, or the JSON of `pulumi stack export`.",
)
@format_option
def command(
    plan: str,
    plan_number: int,
    stack: str,
    config_entries: tuple[str, ...],
    against: Path | None,
    output_format: str,
) -> None:
    """Show what PLAN would create and what each resource costs; nothing is created and nobody is asked.

    PLAN is one plan or the output of recommend; - reads standard input. The resources are those the Pulumi program
    declares for the plan with a stack's default configuration, or that of --config; with --against a stack's
    configuration file, with its configuration. --against also shows what would be added, changed, replaced and removed,
    and the dollars an hour and a month before and after.
    """
    from infra.guardrails import violations
    from infra.preview import PLACEHOLDERS
    from optimizer.catalog import load
    from optimizer.commands.preview_cost import cost_lines, totals
    from optimizer.commands.preview_diff import changes, read_before

    chosen = read_plan_argument(plan, plan_number)
    before = read_before(against, stack=stack) if against else None
    if before is not None:
        _check_same_stack(before, chosen, stack)
    config = {**((before and before.config) or {}), **_config(config_entries)}
    known = before.export.known if before is not None and before.export is not None else None
    found = _declared(chosen, stack, config, known)
    catalog = load()
    lines = cost_lines(found, catalog, chosen.region, prices=chosen.prices, plan=chosen)
    sums, rows = totals(lines), _rows(found, lines)
    answer: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "stack": stack,
        "resources": [{key: row[key] for key in RESOURCE_COLUMNS[:5]} for row in rows],
        "compute_usd_per_hour": chosen.compute_usd_per_hour,
        "hours": chosen.hours.model_dump(mode="json"),
        "cost_usd": chosen.cost_usd.model_dump(mode="json"),
        "prices": [price.model_dump(mode="json") for price in chosen.prices],
        "costs": [{**asdict(line), "usd_per_month": line.usd_per_month} for line in lines],
        "totals": _totals(sums),
    }
    difference: list[Change] | None = None
    if before is not None:
        old = before.export.resources if before.export else _declared(before.plan or chosen, stack, before.config, None)
        difference = changes(old, found)
        old_sums = totals(_old_lines(before, old, catalog, chosen))
        answer["difference"] = {
            "against": before.origin,
            "changes": [asdict(change) for change in difference],
            "before": _totals(old_sums),
            "after": _totals(sums),
        }
    # The rules tell resources apart by the stand-in identifiers.
    broken = [str(each) for each in violations(found if known is None else _declared(chosen, stack, config, None))]
    answer["violations"] = broken
    placeholders = PLACEHOLDERS if known is None else "identifiers of what would be added are placeholders"
    answer["notes"] = notes = [
        *(f"Breaks a rule of infra/guardrails.py: {each}." for each in broken),
        *_warnings(chosen),
        *NOTES,
        f"Offline, so {placeholders}.",
    ]
    if output_format == "json":
        write_json(answer)
        return
    if output_format == "csv":
        write_csv(*_csv(rows, difference))
        return
    _write_tree(found, chosen, stack)
    _write_cost(chosen)
    _write_lines(lines, sums)
    if difference is not None and before is not None:
        _write_difference(before.origin, difference, old_sums, sums)
    for note in notes:
        click.echo(f"- {note}")


def _declared(plan: FleetPlan, stack: str, config: Mapping[str, str] | None, known: Known | None) -> Sequence[Resource]:
    from infra.config import ConfigError
    from infra.preview import resources

    try:
        return resources(plan, stack=stack, config=config, known=known)
    except (ConfigError, ValueError) as error:
        raise InvalidInputError(str(error)) from error


def _config(entries: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{entry!r} is not KEY=VALUE", param_hint="--config")
        found[key if ":" in key else f"gpufleet:{key}"] = value
    return found


def _check_same_stack(before: Before, plan: FleetPlan, stack: str) -> None:
    """Resources are compared by name, and names hold the stack."""
    if before.export is not None and before.export.stack != stack:
        raise InvalidInputError(
            f"{before.origin} is an export of stack {before.export.stack}, and --stack is {stack}",
            next_step=f"gpufleet preview PLAN --stack {before.export.stack} --against {before.origin}",
        )
    region = before.plan.region if before.plan else before.export.region if before.export else ""
    if region and region != plan.region:
        raise InvalidInputError(
            f"{before.origin} is in {region}, and the plan is for {plan.region}",
            why="resources do not move between regions: the stack is destroyed there and created here",
            next_step="preview the plan without --against",
        )


def _old_lines(before: Before, old: Sequence[Resource], catalog: Catalog, plan: FleetPlan) -> list[Line]:
    """Costs of what there was: at its plan's prices, or, of an export, at those of the plan it is compared with."""
    from optimizer.commands.preview_cost import cost_lines

    prices = (before.plan or plan).prices
    return cost_lines(old, catalog, plan.region, prices=prices, plan=before.plan or plan)


def _rows(found: Sequence[Resource], lines: Sequence[Line]) -> list[dict[str, Any]]:
    by_resource: dict[tuple[str, str], float] = {}
    for line in lines:
        if line.usd_per_hour is not None:
            key = (line.type, line.name)
            by_resource[key] = by_resource.get(key, 0.0) + line.usd_per_hour
    rows = []
    for resource in found:
        usd = by_resource.get((resource.type, resource.name))
        rows.append(
            {
                "type": resource.type,
                "name": resource.name,
                "parent": resource.parent,
                "protected": resource.protected,
                "detail": resource.detail,
                "usd_per_hour": None if usd is None else round(usd, 6),
                "usd_per_month": None if usd is None else round(usd * HOURS_PER_MONTH, 2),
            }
        )
    return rows


def _csv(rows: list[dict[str, Any]], difference: Sequence[Change] | None) -> tuple[list[dict[str, Any]], Sequence[str]]:
    if difference is None:
        return rows, RESOURCE_COLUMNS
    kinds = {(change.type, change.name): change.kind for change in difference}
    changed = [{**row, "change": kinds.get((row["type"], row["name"]), "")} for row in rows]
    removed = [
        {"type": change.type, "name": change.name, "change": change.kind}
        for change in difference
        if change.kind == "removed"
    ]
    return changed + removed, (*RESOURCE_COLUMNS, "change")


def _totals(sums: Totals) -> dict[str, float]:
    return {
        "usd_per_hour": sums.with_nodes,
        "usd_per_month": sums.with_nodes * HOURS_PER_MONTH,
        "without_nodes_usd_per_hour": sums.without_nodes,
        "without_nodes_usd_per_month": sums.without_nodes * HOURS_PER_MONTH,
    }


def _write_tree(resources: Sequence[Resource], plan: FleetPlan, stack: str) -> None:
    import sys

    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(
        f"stack {stack}: {plan.node_count} x {plan.instance_type} ({plan.purchase.option}) in {plan.region} for "
        f"{plan.job.model}, {sum(bool(resource.parent) for resource in resources)} resources"
    )
    branches: dict[str, Tree] = {}
    for resource in resources:
        kind = resource.type.rpartition(":")[2]
        if not resource.parent:
            branches[resource.name] = root.add(Text(kind, style="bold"))
            continue
        line = Text.assemble((kind, "cyan"), " ", resource.name)
        if resource.protected:
            line.append(" protected", style="yellow")
        if resource.detail:
            line.append(f"  {resource.detail}", style="dim")
        branches[resource.parent].add(line)
    Console(width=None if sys.stdout.isatty() else 400, highlight=False).print(root)


def _write_cost(plan: FleetPlan) -> None:
    cost = plan.cost_usd
    click.echo("")
    parts: list[dict[str, Any]] = [
        {"part": name.replace("_", " "), "usd": f"{usd:,.2f}"}
        for name, usd in cost.breakdown.model_dump().items()
        if usd
    ]
    parts.append({"part": "expected", "usd": f"{cost.expected:,.2f}"})
    write_table(parts, {"part": "cost of the run", "usd": "USD"})
    click.echo(
        f"Half the runs end within {plan.hours.p50:,.1f} h and {cost.p50:,.2f} USD, 95% within {plan.hours.p95:,.1f} h "
        f"and {cost.p95:,.2f} USD. The nodes cost {plan.compute_usd_per_hour:,.2f} USD an hour while they run.\n"
    )
    write_table(
        [price.model_dump(mode="json") for price in plan.prices],
        {"item": "price of", "usd": "USD", "per": "per", "source": "source", "as_of": "as of"},
    )
    click.echo("")


def _write_lines(lines: Sequence[Line], sums: Totals) -> None:
    """Costs by resource; those that differ in nothing but the resource's name on one line."""
    together: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        kind = line.type.rpartition(":")[2]
        together.setdefault((kind, line.item, line.basis, line.unit_usd, line.note), []).append(line)
    rows = []
    for (kind, item, basis, unit_usd, note), same in together.items():
        quantities = [line.quantity for line in same if line.quantity is not None]
        hourly = [line.usd_per_hour for line in same if line.usd_per_hour is not None]
        rows.append(
            {
                "resource": f"{kind} {same[0].name}" if len(same) == 1 else f"{len(same)} x {kind}",
                "item": f"{item} ({note})" if note else item,
                "quantity": sum(quantities) if quantities else None,
                "per": same[0].per,
                "unit_usd": "unpriced" if unit_usd is None else f"{unit_usd:.10f}".rstrip("0").rstrip("."),
                "usd_per_hour": f"{sum(hourly):,.4f}" if hourly else "-" if basis == "unpriced" else "usage",
                "usd_per_month": f"{sum(hourly) * HOURS_PER_MONTH:,.2f}" if hourly else "",
                "when": basis if hourly else "",
                "price": f"{same[0].source}, {same[0].as_of}" if same[0].source else "",
            }
        )
    columns = {
        "resource": "billed for",
        "item": "item",
        "quantity": "quantity",
        "per": "unit",
        "unit_usd": "USD a unit",
        "usd_per_hour": "USD/h",
        "usd_per_month": "USD/month",
        "when": "billed",
        "price": "price from",
    }
    write_table(rows, columns)
    click.echo(
        f"\nWith all nodes: {sums.with_nodes:,.2f} USD an hour, {sums.with_nodes * HOURS_PER_MONTH:,.2f} a month. "
        f"Without nodes: {sums.without_nodes:,.4f} an hour, {sums.without_nodes * HOURS_PER_MONTH:,.2f} a month.\n"
    )


def _write_difference(origin: str, difference: Sequence[Change], before: Totals, after: Totals) -> None:
    click.echo(f"against {origin}: {len(difference) or 'no'} resources differ")
    if difference:
        write_table(
            [
                {
                    "kind": change.kind,
                    "resource": f"{change.type.rpartition(':')[2]} {change.name}",
                    "arguments": ", ".join(change.arguments),
                }
                for change in difference
            ],
            {"kind": "change", "resource": "resource", "arguments": "arguments"},
        )
    rows = []
    for name, old, new in (
        ("with all nodes", before.with_nodes, after.with_nodes),
        ("without nodes", before.without_nodes, after.without_nodes),
    ):
        rows.append(
            {
                "what": name,
                "before": f"{old:,.4f}",
                "after": f"{new:,.4f}",
                "hour": f"{new - old:+,.4f}",
                "month": f"{(new - old) * HOURS_PER_MONTH:+,.2f}",
            }
        )
    columns = {
        "what": "cost",
        "before": "USD/h before",
        "after": "USD/h after",
        "hour": "difference USD/h",
        "month": "difference USD/month",
    }
    write_table(rows, columns)
    click.echo("")


def _warnings(plan: FleetPlan) -> list[str]:
    """What can make the bill differ from the plan's dollars: prices, and training code that does less than it says."""
    found = []
    split, sharding = plan.parallelism.beyond_data, plan.parallelism.sharding
    needs = [f"{', '.join(split)} parallelism"] * bool(split) + [f"{sharding} sharding"] * (sharding != "ddp")
    if needs:
        found.append(
            f"The hours and memory are those of training code that implements {' and '.join(needs)} "
            f"({plan.parallelism.in_short}), and keeps checkpoints of it. bootstrap.training keeps replicated "
            "states of data parallelism only (docs/training.md), and nodes are paid while code fails on them."
        )
    derived = [price for price in plan.prices if price.source == DERIVED_SPOT]
    if derived:
        found.append(
            f"The spot price is derived from the Spot Advisor's saving of {derived[0].as_of.isoformat()}, not quoted, "
            "and the 95% do not allow for another: `gpufleet catalog refresh` reads today's, then recommend again."
        )
    if plan.purchase.option == "reserved" and plan.purchase.capacity_reservation_id is None:
        found.append(
            f"The stack makes a capacity reservation for {plan.node_count} x {plan.instance_type}, billed on demand "
            "from creation to destroy, used or not, unless reserved instances or a savings plan you own cover it; it "
            "buys none."
        )
    return found
