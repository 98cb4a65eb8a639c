"""``gpufleet what-if``: cost against deadline, nodes and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from optimizer.catalog import load
from optimizer.commands.output import format_option, write_notes, write_rows, write_truer
from optimizer.commands.progress import patience
from optimizer.commands.recommend import command as recommend_command
from optimizer.commands.recommend import read_request
from optimizer.commands.recommend.tables import plan_row
from optimizer.commands.request_options import RequestCommand, calibration_option, chosen_calibration
from optimizer.contract.errors import GpufleetError, InvalidInputError, NothingFeasibleError
from optimizer.contract.request import Constraints, Workload
from optimizer.contract.units import parse_count, parse_hours, parse_usd
from optimizer.what_if import Axis, find_curves

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
_PARSERS: dict[Axis, Callable[[str], float]] = {"deadline": parse_hours, "nodes": parse_count, "budget": parse_usd}
_REQUEST_PARAMETERS = {"request_file", "model", *Workload.model_fields, *Constraints.model_fields}


def _parse_against(given: Sequence[str]) -> dict[Axis, list[float]]:
    """Read "deadline" and "deadline=12h,3d" as curves with their values; without any, all curves without values."""
    curves: dict[Axis, list[float]] = {}
    for text in given:
        name, _equals, values = text.partition("=")
        axis = next((axis for axis in _PARSERS if axis == name), None)
        if axis is None:
            raise click.BadParameter(f"{name!r} is none of {', '.join(_PARSERS)}", param_hint="--against")
        try:
            curves[axis] = [float(_PARSERS[axis](part.strip())) for part in values.split(",") if values]
        except (ValueError, GpufleetError) as error:
            raise _wrong_values(text, f": {error}") from error
        if any(not 0 < number < 1e12 for number in curves[axis]):
            raise _wrong_values(text)
    return {axis: curves[axis] for axis in _PARSERS if axis in curves} or {axis: [] for axis in _PARSERS}


def _wrong_values(text: str, reason: str = "") -> InvalidInputError:
    return InvalidInputError(
        f"--against is {text!r}{reason}",
        limit="numbers above 0, with commas between them",
        next_step="gpufleet what-if --help",
    )


@click.command(
    cls=RequestCommand,
    epilog="""\b
Example:
  gpufleet what-if request.yaml
  gpufleet what-if request.yaml --against deadline=12h,24h,48h,3d --format csv
  gpufleet what-if --model llama-3.1-8b --tokens 2B --seq-len 8192 --against nodes
""",
)
@click.option(
    "--against",
    metavar="LIMIT[=VALUE,...]",
    multiple=True,
    help="Curve to show: deadline, nodes or budget, also with the values to try (deadline=12h,3d; nodes=1,2,4; "
    "budget=100,1k); repeatable.  [default: all three]",
)
@calibration_option
@format_option
def command(
    against: tuple[str, ...],
    calibration: Path | None,
    output_format: str,
    request_file: Path | None,
    **flags: Any,
) -> None:
    """Show what the training costs against the deadline, the number of nodes and the budget.

    Takes the request of gpufleet recommend: REQUEST.yaml, its flags, or both. Each row is the plan that recommend puts
    first with one limit at another value and the request's other limits: with objective cost for a deadline or a node
    count, the fastest at a current price for a budget. Limits bind the 95th percentile. Old spot prices (~) count only
    where no plan at a current price keeps the limits. Exit status 3: no point has a plan.
    """
    curves = _parse_against(against)
    request = read_request(request_file, flags)
    too_many = [count for count in curves.get("nodes", ()) if count > request.constraints.max_nodes]
    if too_many:
        raise InvalidInputError(
            f"--against nodes has {too_many[0]:g}",
            limit=f"max_nodes {request.constraints.max_nodes}",
            why="the search goes no further",
            next_step=f"--max-nodes {max(too_many):g}",
        )
    catalog = load()
    write_notes(catalog.notes)
    with patience("searching the points of the curves"):
        curve_points = find_curves(request, catalog, chosen_calibration(calibration), curves)
    if not any(point.plan for point in curve_points):
        given_values = " and ".join(f"values of {name}" for name, values in curves.items() if values)
        raise NothingFeasibleError(
            "no point of the curves has a plan",
            why=f"{f'{given_values}, ' if given_values else ''}the request's other limits, its instance types or its "
            "regions leave none",
            next_step=f"without {given_values}, gpufleet what-if chooses the values"
            if given_values
            else "gpufleet recommend, with the same request, names the nearest plan for each limit",
        )
    rows = [
        {"against": point.against, "value": point.value} | (plan_row(point.plan) if point.plan else {})
        for point in curve_points
    ]
    if output_format == "table":
        rows = [row | {"cost_usd_expected": row.get("usd")} for row in rows]
    write_rows(
        rows,
        COLUMNS if output_format == "table" else COLUMNS | {"price_stale": "price_stale"},
        output_format,
        title="What a plan costs, by one limit",
        spare=("steps", "gpus", "parallelism", "region", "hours_expected", "option", "hours_p95"),
    )
    plans = [point.plan for point in curve_points if point.plan]
    write_truer(catalog, is_spot_old=any(plan.spot_range and plan.spot_range.age_days for plan in plans))


# The request's own parameters have one definition, recommend's.
command.params = [p for p in recommend_command.params if p.name in _REQUEST_PARAMETERS] + command.params
