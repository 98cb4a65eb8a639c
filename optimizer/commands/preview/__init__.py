"""``gpufleet preview``: what a plan would create and cost, without an account or the Pulumi CLI."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from pulumi import RunError

from infra.offline import preview
from infra.offline.preview import PLACEHOLDERS, Resource
from optimizer.catalog import load
from optimizer.commands.options import config_option, plan_arguments, read_plan_argument
from optimizer.commands.output import format_option, write_csv, write_json, write_plan_truer, write_text
from optimizer.commands.preview.cost import CostLine, cost_lines, totals
from optimizer.commands.preview.tables import write_brief, write_lines, write_resources
from optimizer.commands.progress import patience
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import DERIVED_SPOT
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.training_code import describe_demands

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
  gpufleet preview plans.json --all
  gpufleet preview plans.json --plan 2 --format json
  gpufleet preview plans.json --config nat=true --config alarmEmail=ops@example.com
"""
)
@plan_arguments
@click.option("--stack", default="dev", show_default=True, metavar="NAME", help="Stack name to preview under.")
@config_option
@click.option("--all", "show_all", is_flag=True, help="List every resource, every price and the bill by resource.")
@format_option
def command(
    plan: str,
    plan_number: int,
    stack: str,
    config_given: dict[str, str],
    show_all: bool,
    output_format: str,
) -> None:
    """Show what PLAN would create and what each resource costs; nothing is created and nobody is asked.

    PLAN is one plan or the output of recommend; - reads standard input. The resources are those that the Pulumi program
    declares for the plan, with a stack's default configuration or that of --config. `pulumi preview --diff` compares
    with a deployed stack.
    """
    chosen = read_plan_argument(plan, plan_number)
    with patience("running the Pulumi program offline"):
        catalog = load()
        try:
            resources = preview.resources(chosen, stack=stack, config=config_given)
        except (ValueError, RunError) as error:  # RunError: a value is no number
            raise InvalidInputError(str(error)) from error
        lines = cost_lines(resources, catalog, chosen)
        sums = totals(lines)
    decisive = _warnings(chosen)
    notes = [*decisive, *NOTES, f"Offline, so {PLACEHOLDERS}."]
    if output_format == "json":
        write_json({**_document(chosen, stack, resources, lines, sums), "notes": notes})
    elif output_format == "csv":
        write_csv(_rows(resources, lines), RESOURCE_COLUMNS)
    else:
        write_brief(resources, chosen, stack, sums)
        if show_all:
            write_resources(resources)
            write_lines(lines, chosen)
        for note in notes if show_all else decisive:
            write_text(f"- {note}", indent="  ")
        if not show_all:
            write_text(
                "--all: every resource, every price with its source, the bill by resource, and what it rests on."
            )
    write_plan_truer(plan, plan_number)


def _document(
    plan: FleetPlan, stack: str, resources: Sequence[Resource], lines: Sequence[CostLine], sums: dict[str, float]
) -> dict[str, Any]:
    data = plan.model_dump(mode="json", include={"hours", "cost_usd", "prices", "alternates"})
    return {
        "schema_version": SCHEMA_VERSION,
        "stack": stack,
        "resources": [{key: getattr(resource, key) for key in RESOURCE_COLUMNS[:5]} for resource in resources],
        "compute_usd_per_hour": plan.compute_usd_per_hour,
        **data,
        "costs": [
            {**asdict(line), "usd_per_month": line.usd_per_hour and line.usd_per_hour * HOURS_PER_MONTH}
            for line in lines
        ],
        "totals": sums,
    }


def _rows(resources: Sequence[Resource], lines: Sequence[CostLine]) -> list[dict[str, Any]]:
    usd_per_hour: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        if line.usd_per_hour is not None:
            usd_per_hour[line.type, line.name] += line.usd_per_hour
    rows = []
    for resource in resources:
        row = {name: getattr(resource, name) for name in RESOURCE_COLUMNS[:5]}
        if (usd := usd_per_hour.get((resource.type, resource.name))) is not None:
            row |= {"usd_per_hour": round(usd, 6), "usd_per_month": round(usd * HOURS_PER_MONTH, 2)}
        rows.append(row)
    return rows


def _warnings(plan: FleetPlan) -> list[str]:
    warnings = [describe_demands(plan)]
    derived = [price for price in plan.prices if price.source == DERIVED_SPOT]
    if derived:
        warnings.append(
            f"The spot price is derived from the Spot Advisor's saving of {derived[0].as_of.isoformat()}, not quoted, "
            "and the 95% do not allow for another: `gpufleet catalog refresh` reads today's, then recommend again."
        )
    if plan.purchase.option == "reserved" and plan.purchase.capacity_reservation_id is None:
        warnings.append(
            f"The stack makes a capacity reservation for {plan.node_count} x {plan.instance_type}, billed on demand "
            "from creation to destroy, used or not, unless reserved instances or a savings plan you own cover it; it "
            "buys none."
        )
    return warnings
