"""The table of ``recommend --compare-clouds``: other clouds' fleets beside AWS's."""

from __future__ import annotations

from dataclasses import asdict

import click

from optimizer.clouds.compare import BASIS, Comparison, compare_clouds
from optimizer.clouds.offers import NOT_PROVISIONED, load_offers, price_notes
from optimizer.commands.output import write_notes, write_table, write_text
from optimizer.contract.plan import FleetPlan, Parallelism
from optimizer.recommend import Recommendation

COLUMNS = {
    "cloud": "cloud",
    "instance_type": "type",
    "region": "region",
    "node_count": "nodes",
    "gpus": "GPUs",
    "layout": "parallelism",
    "sharding": "sharding",
    "hours_expected": "hours",
    "hours_p95": "p95 h",
    "compute_usd_expected": "compute USD",
    "compute_usd_p95": "p95 USD",
    "ratio_to_best_aws": "x best AWS",
    "ratio_to_best_aws_on_demand": "x AWS on demand",
    "keeps": "within limits",
    "measured_rows": "runs",
    "price_as_of": "priced",
}
# Left out of a narrow table, the first first.
SPARE = (
    *("ratio_to_best_aws_on_demand", "sharding", "measured_rows", "price_as_of", "compute_usd_p95", "layout"),
    *("region", "hours_p95", "node_count"),
)
LEFT_OUT = {"cloud": "cloud", "instance_type": "type", "reason": "reason"}


def compared(answer: Recommendation) -> Comparison:
    """Compare other clouds with ``answer``; print the sources and ages of their prices on standard error."""
    clouds = load_offers()
    write_notes(price_notes(clouds))
    return compare_clouds(answer, clouds)


def print_comparison(comparison: Comparison) -> None:
    """Print the table, AWS's best plans, and the types left out with their reasons."""
    click.echo()
    rows = [
        {
            **asdict(row),
            "gpus": f"{row.node_count * row.gpu_count} {row.gpu}",
            "layout": Parallelism.model_validate(row.parallelism).in_short,
            "sharding": row.parallelism["sharding"],
            "keeps": "yes" if row.feasible else "no",
        }
        for row in comparison.rows
    ]
    if rows:
        write_table(rows, COLUMNS, title="Other clouds, the best fleet of each type", spare=SPARE)
    write_text(f"best AWS plan: {_summary(comparison.best_aws)}")
    write_text(f"best AWS plan on demand: {_summary(comparison.best_aws_on_demand)}")
    write_text(f"{BASIS}.\n{NOT_PROVISIONED}.")
    if comparison.not_compared:
        click.echo()
        write_table(comparison.not_compared, LEFT_OUT, title="Types of other clouds not compared")


def _summary(plan: FleetPlan | None) -> str:
    if plan is None:
        return "none"
    return (
        f"{plan.node_count} x {plan.instance_type} in {plan.region}, {plan.purchase.option}, "
        f"{plan.hours.expected:.1f} h, compute {plan.cost_usd.breakdown.compute:,.2f} USD"
    )
