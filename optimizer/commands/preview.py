"""``gpufleet preview``: what a plan would create and cost, without an account or the Pulumi CLI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.output import format_option, write_csv, write_json, write_table
from optimizer.commands.stack import read_plan_argument
from optimizer.errors import InvalidInputError
from optimizer.plan import DERIVED_SPOT, SCHEMA_VERSION, FleetPlan

if TYPE_CHECKING:
    from infra.preview import Resource

NOTES = (
    "The dollars are the plan's: compute, volumes, checkpoints kept and interface endpoints over the run. Not in them: "
    "KMS, SQS and S3 requests, logs, alarms, checkpoints after the run.",
    "Protected resources hold the checkpoints: `pulumi destroy` refuses until gpufleet:forceDestroy is true; "
    "`pulumi destroy --exclude-protected` ends all hourly cost and keeps them.",
)


@click.command(
    epilog="""\b
Example:
  gpufleet recommend request.yaml --format json > plans.json
  gpufleet preview plans.json
  gpufleet preview plans.json --plan 2 --format json
"""
)
@click.argument("plan")
@click.option(
    "--plan", "plan_number", type=click.IntRange(min=1), default=1, show_default=True, help="Which plan of PLAN."
)
@click.option("--stack", default="dev", show_default=True, metavar="NAME", help="Stack name to preview under.")
@format_option
def command(plan: str, plan_number: int, stack: str, output_format: str) -> None:
    """Show what PLAN would create and what it would cost; nothing is created and nobody is asked.

    PLAN is one plan or the output of recommend; - reads standard input. The resources are those the Pulumi program
    declares for the plan with a stack's default configuration.
    """
    chosen = read_plan_argument(plan, plan_number)

    from infra.config import ConfigError
    from infra.preview import PLACEHOLDERS, resources

    try:
        found = resources(chosen, stack=stack)
    except (ConfigError, ValueError) as error:
        raise InvalidInputError(str(error)) from error
    rows = [
        {
            "type": resource.type,
            "name": resource.name,
            "parent": resource.parent,
            "protected": resource.protected,
            "detail": resource.detail,
        }
        for resource in found
    ]
    notes = [*_warnings(chosen), *NOTES, f"Offline, so {PLACEHOLDERS}."]
    if output_format == "json":
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "stack": stack,
                "resources": rows,
                "compute_usd_per_hour": chosen.compute_usd_per_hour,
                "hours": chosen.hours.model_dump(mode="json"),
                "cost_usd": chosen.cost_usd.model_dump(mode="json"),
                "prices": [price.model_dump(mode="json") for price in chosen.prices],
                "notes": notes,
            }
        )
    elif output_format == "csv":
        write_csv(rows, ["type", "name", "parent", "protected", "detail"])
    else:
        _write_tree(found, chosen, stack)
        _write_cost(chosen)
        for note in notes:
            click.echo(f"- {note}")


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
