"""Tables of ``gpufleet preview``: the tree of resources, the plan's dollars, the bill by resource."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from infra.offline.preview import Resource
from optimizer.commands.output import output_width, write_table, write_text
from optimizer.commands.preview.cost import CostLine
from optimizer.commands.recommend.tables import write_places
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import HOURS_PER_MONTH, short


def _name_parts(plan: FleetPlan) -> dict[str, float]:
    """Name the parts of the run's dollars as docs/GLOSSARY.md does."""
    return {name.replace("head_node", "controller"): usd for name, usd in plan.cost_usd.breakdown.model_dump().items()}


def write_brief(resources: Sequence[Resource], plan: FleetPlan, stack: str, sums: dict[str, float]) -> None:
    """Print what decides: the stack, how many resources it has, the run's dollars, and those of an hour."""
    cost = plan.cost_usd
    components = [resource for resource in resources if not resource.parent]
    parts = Counter(resource.parent for resource in resources if resource.parent)
    counts = ", ".join(f"{component.type.rpartition(':')[2]} {parts[component.name]}" for component in components)
    protected = sorted({resource.name for resource in resources if resource.protected})
    dollars = ", ".join(f"{name} {usd:,.2f}" for name, usd in _name_parts(plan).items() if usd)
    for line in (
        describe_stack(plan, stack),
        f"creates  {parts.total()} resources: {counts}; protected: {', '.join(protected) or 'none'}",
        f"run      {cost.expected:,.2f} USD expected ({dollars}), {cost.p95:,.2f} at p95; "
        f"{short(plan.hours.expected)} h expected, {short(plan.hours.p95)} at p95",
        *([f"data     {plan.staging.describe(plan.node_count)}"] if plan.staging else []),
        *([f"data     {plan.lustre.describe()}"] if plan.lustre else []),
        f"hour     {sums['usd_per_hour']:,.2f} USD with all nodes; without nodes "
        f"{sums['without_nodes_usd_per_hour']:,.4f}, {sums['without_nodes_usd_per_month']:,.2f} a month, "
        "until `pulumi destroy --exclude-protected`",
    ):
        write_text(line, indent=" " * 9)
    write_places(plan)


def describe_stack(plan: FleetPlan, stack: str) -> str:
    """Name a stack with its fleet and its job."""
    return f"stack {stack}: {plan.fleet} in {plan.region} for {plan.job.model}"


def write_tree(resources: Sequence[Resource], plan: FleetPlan, stack: str) -> None:
    """Print components and their resources, each with its details."""
    root = Tree(f"{describe_stack(plan, stack)}, {sum(bool(resource.parent) for resource in resources)} resources")
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
    Console(width=output_width(), highlight=False).print(root)


def write_cost(plan: FleetPlan) -> None:
    """Print the plan's dollars of the whole run, and its prices."""
    cost = plan.cost_usd
    click.echo("")
    parts: list[dict[str, Any]] = [
        {"cost of the run": name, "USD": f"{usd:,.2f}"} for name, usd in _name_parts(plan).items() if usd
    ]
    parts.append({"cost of the run": "expected", "USD": f"{cost.expected:,.2f}"})
    write_table(parts)
    if plan.staging:
        write_text(f"{plan.staging.describe(plan.node_count)}. Bound: {plan.staging.source}.\n")
    if plan.lustre:
        write_text(f"{plan.lustre.describe()}.\n")
    write_text(
        f"Half the runs end within {plan.hours.p50:,.1f} h and {cost.p50:,.2f} USD, 95% within {plan.hours.p95:,.1f} h "
        f"and {cost.p95:,.2f} USD. The nodes cost {plan.compute_usd_per_hour:,.2f} USD an hour while they run.\n"
    )
    write_table(
        [price.model_dump(mode="json") for price in plan.prices],
        {"item": "price of", "usd": "USD", "per": "per", "source": "source", "as_of": "as of"},
    )
    write_places(plan)
    click.echo("")


def write_lines(lines: Sequence[CostLine], sums: dict[str, float]) -> None:
    """Print costs by resource; resources that differ in name only share a row."""
    groups: dict[tuple[Any, ...], list[CostLine]] = {}
    for line in lines:
        kind = line.type.rpartition(":")[2]
        groups.setdefault((kind, line.item, line.basis, line.unit_usd, line.note), []).append(line)
    rows = []
    for (kind, item, basis, unit_usd, note), same in groups.items():
        quantities = [line.quantity for line in same if line.quantity is not None]
        hourly = [line.usd_per_hour for line in same if line.usd_per_hour is not None]
        rows.append(
            {
                "billed for": f"{kind} {same[0].name}" if len(same) == 1 else f"{len(same)} x {kind}",
                "item": f"{item} ({note})" if note else item,
                "quantity": sum(quantities) if quantities else None,
                "unit": same[0].per,
                "USD a unit": "unpriced" if unit_usd is None else f"{unit_usd:.10f}".rstrip("0").rstrip("."),
                "USD/h": f"{sum(hourly):,.4f}" if hourly else "-" if basis == "unpriced" else "usage",
                "USD/month": f"{sum(hourly) * HOURS_PER_MONTH:,.2f}" if hourly else "",
                "billed": basis if hourly else "",
                "price from": f"{same[0].source}, {same[0].as_of}" if same[0].source else "",
            }
        )
    write_table(rows, spare=("price from", "USD a unit", "unit", "quantity"))
    write_text(
        f"\nWith all nodes: {sums['usd_per_hour']:,.2f} USD an hour, {sums['usd_per_month']:,.2f} a month. "
        f"Without nodes: {sums['without_nodes_usd_per_hour']:,.4f} an hour, "
        f"{sums['without_nodes_usd_per_month']:,.2f} a month.\n"
    )
