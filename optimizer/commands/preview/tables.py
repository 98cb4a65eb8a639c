"""Tables of ``gpufleet preview``: the resources, the plan's dollars, the bill by resource."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from infra.offline.preview import Resource
from optimizer.commands.output import write_table, write_text
from optimizer.commands.preview.cost import CostLine
from optimizer.commands.recommend.tables import write_places
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import HOURS_PER_MONTH, short


def write_brief(resources: Sequence[Resource], plan: FleetPlan, stack: str, sums: dict[str, float]) -> None:
    """Print the stack, its number of resources, and the dollars of the run and of an hour."""
    cost = plan.cost_usd
    components = [resource for resource in resources if not resource.parent]
    parts = Counter(resource.parent for resource in resources if resource.parent)
    counts = ", ".join(f"{component.kind} {parts[component.name]}" for component in components)
    protected = sorted({resource.name for resource in resources if resource.protected})
    # docs/GLOSSARY.md names the parts.
    usd_by_part = {name.replace("head_node", "controller"): usd for name, usd in cost.breakdown}
    dollars = ", ".join(f"{name} {usd:,.2f}" for name, usd in usd_by_part.items() if usd)
    for line in (
        f"stack {stack}: {plan.fleet} in {plan.region} for {plan.job.model}",
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


def write_resources(resources: Sequence[Resource]) -> None:
    """Print components and their resources, each with its details."""
    for component in (resource for resource in resources if not resource.parent):
        write_text(f"\n{component.kind}")
        for resource in resources:
            if resource.parent == component.name:
                name = f"{resource.name} protected" if resource.protected else resource.name
                write_text(f"  {resource.kind} {name}  {resource.detail}".rstrip(), indent="      ")


def write_lines(lines: Sequence[CostLine], plan: FleetPlan) -> None:
    """Print the plan's prices and the costs by resource; resources that differ in name only share a row."""
    columns = {"item": "price of", "usd": "USD", "per": "per", "source": "source", "as_of": "as of"}
    click.echo("")
    write_table([price.model_dump(mode="json") for price in plan.prices], columns)
    click.echo("")
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
