"""``gpufleet what-if``: cost against deadline, nodes and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from bootstrap.contract.words import counted
from optimizer.catalog import load
from optimizer.commands.output import format_option, write_catalog_notes, write_notes, write_rows
from optimizer.commands.plot import check_plot, new_figure, plot_option, save_plot
from optimizer.commands.progress import patience
from optimizer.commands.recommend import command as recommend_command
from optimizer.commands.recommend import read_request
from optimizer.commands.recommend.tables import usd_in_table
from optimizer.commands.request_options import calibration_option, chosen_calibration
from optimizer.contract.errors import GpufleetError, InvalidInputError, NothingFeasibleError
from optimizer.contract.request import Constraints, Workload
from optimizer.contract.units import parse_hours, parse_usd
from optimizer.what_if import Axis, CurvePoint, find_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = {
    "against": "against",
    "value": "limit",
    "instance_type": "type",
    "region": "region",
    "node_count": "nodes",
    "gpus": "GPUs",
    "option": "purchase",
    "parallelism": "parallelism",
    "steps": "steps",
    "hours_expected": "hours",
    "hours_p95": "p95 h",
    "cost_usd_expected": "USD",
    "cost_usd_p95": "p95 USD",
}
_LABELS: dict[Axis, str] = {"deadline": "deadline, h", "nodes": "nodes", "budget": "budget, USD"}
_VALUES: dict[Axis, str] = {"deadline": "--deadlines", "nodes": "--node-counts", "budget": "--budgets"}
_REQUEST_PARAMETERS = {"request_file", "model", *Workload.model_fields, *Constraints.model_fields}


def _parse_list(parse: Callable[[str], float]) -> Callable[..., list[float]]:
    def read(_: click.Context, parameter: click.Parameter, value: str | None) -> list[float]:
        try:
            values = [float(parse(part.strip())) for part in value.split(",")] if value is not None else []
        except (ValueError, GpufleetError) as error:
            raise InvalidInputError(
                f"{parameter.opts[0]} is {value!r}: {error}",
                limit="numbers above 0, with commas between them",
                next_step="gpufleet what-if --help",
            ) from error
        if any(not 0 < number < 1e12 for number in values):
            raise InvalidInputError(
                f"{parameter.opts[0]} is {value!r}",
                limit="numbers above 0, with commas between them",
                next_step="gpufleet what-if --help",
            )
        return values

    return read


@click.command(
    epilog="""\b
Example:
  gpufleet what-if request.yaml
  gpufleet what-if request.yaml --against deadline --deadlines 12h,24h,48h,3d --format csv
  gpufleet what-if --model llama-3.1-8b --tokens 2B --seq-len 8192 --plot curves.svg
"""
)
@click.option(
    "--against",
    type=click.Choice(get_args(Axis)),
    multiple=True,
    help="Curve to show; repeatable.  [default: all three, or those with values]",
)
@click.option("--deadlines", metavar="12h,24h,3d", callback=_parse_list(parse_hours), help="Deadlines to try.")
@click.option("--node-counts", metavar="1,2,4", callback=_parse_list(int), help="Node counts to try.")
@click.option("--budgets", metavar="100,1k", callback=_parse_list(parse_usd), help="Budgets to try, USD.")
@click.option(
    "--points",
    type=click.IntRange(2, 100),
    default=8,
    show_default=True,
    help="Points of a curve without values, from the fastest plan to the cheapest.",
)
@plot_option
@calibration_option
@format_option
def command(
    against: tuple[Axis, ...],
    deadlines: list[float],
    node_counts: list[float],
    budgets: list[float],
    points: int,
    plot: Path | None,
    calibration: Path | None,
    output_format: str,
    request_file: Path | None,
    **flags: Any,
) -> None:
    """Show what the training costs against the deadline, the number of nodes and the budget.

    Takes the request of gpufleet recommend: REQUEST.yaml, its flags, or both. Each row is the best plan with one limit
    at another value and the request's other limits: the cheapest for a deadline or a node count, the fastest for a
    budget. Limits bind the 95th percentile. The cheapest has the least expected USD, so a later deadline never costs
    more; recommend may prefer a tie that is surer or simpler. A budget takes old spot prices (~); a deadline and a node
    count only where no plan at a current price is as fast. Exit status 3: no point has a plan.
    """
    if plot:
        check_plot(plot)
    values: dict[Axis, list[float]] = {"deadline": deadlines, "nodes": node_counts, "budget": budgets}
    wanted = against or tuple(name for name, given in values.items() if given) or tuple(values)
    if ignored := [name for name, given in values.items() if given and name not in wanted]:
        flag = _VALUES[ignored[0]]
        raise InvalidInputError(
            f"{flag} has values, and --against leaves out {ignored[0]}",
            limit="values of the curves to show",
            next_step=f"--against {ignored[0]} too, or leave out {flag}",
        )
    request = read_request(request_file, flags)
    too_many = [count for count in node_counts if count > request.constraints.max_nodes]
    if too_many:
        raise InvalidInputError(
            f"--node-counts has {too_many[0]:g}",
            limit=f"max_nodes {request.constraints.max_nodes}",
            why="the search goes no further",
            next_step=f"--max-nodes {max(too_many):g}",
        )
    catalog = load()
    write_catalog_notes(catalog, brief=output_format == "table")
    with patience("searching the points of the curves"):
        curve_points = find_curves(
            request,
            catalog,
            chosen_calibration(calibration),
            axes={name: values[name] for name in values if name in wanted},
            points=points,
        )
    if not any(point.plan for point in curve_points):
        given_values = " and ".join(_VALUES[name] for name in wanted if values[name])
        raise NothingFeasibleError(
            "no point of the curves has a plan",
            why=f"{f'{given_values}, ' if given_values else ''}the request's other limits, its instance types or its "
            "regions leave none",
            next_step=f"without {given_values}, gpufleet what-if chooses the values"
            if given_values
            else "gpufleet recommend, with the same request, names the nearest plan for each limit",
        )
    rows = [_row(point) for point in curve_points]
    if output_format == "table":
        rows = [
            row | {"cost_usd_expected": usd_in_table(point.plan)} if point.plan else row
            for row, point in zip(rows, curve_points, strict=True)
        ]
    write_rows(
        rows,
        COLUMNS if output_format == "table" else COLUMNS | {"price_stale": "price_stale"},
        output_format,
        title="What a plan costs, by one limit",
        spare=("steps", "gpus", "parallelism", "region", "hours_expected", "option", "hours_p95"),
    )
    old = [point.plan.spot_range.age_days for point in curve_points if point.plan and point.plan.spot_range]
    if old and output_format == "table":
        write_notes([f"spot prices (~) are {counted(max(old), 'day')} old: gpufleet recommend --refresh reads today's"])
    if plot:
        _draw(plot, curve_points)


# The request's own parameters have one definition, recommend's.
command.params = [p for p in recommend_command.params if p.name in _REQUEST_PARAMETERS] + command.params


def _row(point: CurvePoint) -> dict[str, Any]:
    row: dict[str, Any] = {"against": point.against, "value": point.value}
    plan = point.plan
    if plan is None:
        return row
    return row | {
        "instance_type": plan.instance_type,
        "region": plan.region,
        "node_count": plan.node_count,
        "gpus": plan.gpus,
        "option": plan.purchase.in_short,
        "parallelism": plan.parallelism.in_short,
        "steps": plan.job.steps,
        "hours_expected": plan.hours.expected,
        "hours_p95": plan.hours.p95,
        "cost_usd_expected": plan.cost_usd.expected,
        "cost_usd_p95": plan.cost_usd.p95,
        "price_stale": "yes" if plan.spot_range else "no",
    }


def _draw(path: Path, curve_points: Sequence[CurvePoint]) -> None:
    axes = list(dict.fromkeys(point.against for point in curve_points))
    figure = new_figure(4.5 * len(axes), 4)
    for place, name in enumerate(axes, start=1):
        _draw_curve(figure.add_subplot(1, len(axes), place), name, [p for p in curve_points if p.against == name])
    save_plot(figure, path)


def _draw_curve(axes: Axes, against: Axis, curve_points: Sequence[CurvePoint]) -> None:
    drawn = [(point.value, point.plan) for point in curve_points if point.plan]
    values = [value for value, _ in drawn]
    by_budget = against == "budget"
    spreads = [plan.hours if by_budget else plan.cost_usd for _, plan in drawn]
    heights = [spread.expected for spread in spreads]
    axes.plot(values, heights, "o-", label="expected")
    axes.plot(values, [spread.p95 for spread in spreads], "--", label="p95")
    axes.set_xscale("log", base=2 if against == "nodes" else 10)
    axes.set_xlabel(_LABELS[against])
    axes.set_ylabel("hours" if by_budget else "USD")
    if heights and max(heights) > 10 * min(heights):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
