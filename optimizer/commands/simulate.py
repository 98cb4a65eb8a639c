"""``gpufleet simulate``: spot policies over traces of availability."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from optimizer.catalog import load
from optimizer.commands.long_help import FurtherOption, LongCommand
from optimizer.commands.options import FiniteRange, Hours
from optimizer.commands.output import format_option, write_notes, write_rows, write_table
from optimizer.commands.progress import steps
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.contract.units import rounded
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.simulation.price_history import PriceHistory, assume_capacity, read_histories, usd_by_tick
from optimizer.economics.simulation.replay import NAMES, PolicyFigures, replay
from optimizer.economics.simulation.simulator import SimulatedJob
from optimizer.economics.simulation.traces import CapacityTrace, read_trace
from optimizer.performance.types import Floats

COLUMNS = {
    "trace": "trace",
    "policy": "policy",
    "mean_normalised_cost": "cost",
    "normalised_cost_p50": "p50",
    "normalised_cost_p95": "p95",
    "missed_fraction": "missed",
    "spot_hours": "spot h",
    "on_demand_hours": "on-demand h",
    "interruptions": "interruptions",
    "starts": "starts",
    "refusals": "refusals",
    "moves": "moves",
}
_SPARE = ("starts", "moves", "refusals", "normalised_cost_p50", "interruptions", "spot_hours")
_MEANS = {field: heading for field, heading in COLUMNS.items() if field not in ("trace", "starts", "refusals", "moves")}


@click.command(
    cls=LongCommand,
    epilog="""\b
Example:
  gpufleet simulate --trace us-west-2a.json --work-hours 48 --deadline-hours 57.6
  gpufleet simulate --trace traces/*.json --work-hours 2d --deadline-hours 3d --policy all --format csv
  gpufleet simulate --trace zone-a.json zone-b.json --together --nodes 16 --work-hours 48 --deadline-hours 72
  gpufleet simulate --trace pool.json --nodes 4 --work-hours 48 --deadline-hours 72 --checkpoint-hours 0.5
  gpufleet simulate --price-history history.json --work-hours 48 --deadline-hours 72
""",
)
@click.option(
    "--trace",
    "first_traces",
    metavar="FILE...",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trace file; repeatable, or several names after one flag.",
)
@click.argument("more_traces", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--work-hours", required=True, type=Hours(), help="Hours of work without interruption.")
@click.option("--deadline-hours", required=True, type=Hours(), help="Hours from the start to the deadline.")
@click.option(
    "--restart-hours",
    type=FiniteRange(min=0),
    default=RESTART_HOURS,
    show_default=True,
    help="Hours from a launch to the first new step.",
)
@click.option(
    "--checkpoint-hours",
    cls=FurtherOption,
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Checkpoint interval: an interruption loses a uniform part of it.",
)
@click.option(
    "--price-ratio", type=FiniteRange(min=1), default=3.3, show_default=True, help="On-demand price over spot price."
)
@click.option("--together", is_flag=True, help="One run that may take its nodes from the pools of all traces.")
@click.option(
    "--price-history",
    "price_histories",
    cls=FurtherOption,
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON of aws ec2 describe-spot-price-history, of one type; repeatable (regions). Implies --together.",
)
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes, started all or none.")
@click.option(
    "--policy",
    type=click.Choice([*NAMES, "all"]),
    multiple=True,
    default=["all"],
    help="Policy; repeatable.  [default: all]",
)
@click.option(
    "--starts",
    cls=FurtherOption,
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Starts a trace, at random.",
)
@click.option(
    "--seed",
    cls=FurtherOption,
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of starts and delays.",
)
@format_option
def command(
    first_traces: tuple[Path, ...],
    more_traces: tuple[Path, ...],
    policy: tuple[str, ...],
    nodes: int,
    starts: int,
    seed: int,
    together: bool,
    price_histories: tuple[Path, ...],
    output_format: str,
    **job: Any,
) -> None:
    """Replay spot policies over traces of spot capacity: cost, missed deadlines, interruptions.

    Cost is a share of on-demand's from start to end; a run ends with its work or at its deadline. on_demand and
    spot_only pay one way only; greedy waits for spot until the deadline allows it no more; uniform_progress is the
    policy of "Can't Be Late" (NSDI'24); fallback buys on demand to the end once spot has not come for 45 minutes, as a
    stack does by default; adaptive is gpufleet's own, the rule of a stack's controller, which learns how long capacity
    stays and stays away, and keeps the deadline; omniscient is the lower bound of
    all policies, with the trace known beforehand. A policy knows a pool by its own launches only: it asks one pool at a
    time, for all nodes, beside running ones. A trace is {"metadata": {"gap_seconds": G}, "data": [...]} with the number
    of nodes available in each tick.

    With --price-history an hour of spot costs what it did in the trace's zone at that time, beside the catalog's
    on-demand price: adaptive and omniscient go by these prices. The zone is in the trace's file name, and its begin in
    metadata.start_time. Without a trace every zone of the history is assumed to have capacity all the time.
    """
    together = together or bool(price_histories)
    paths = (*first_traces, *more_traces)
    if not paths and not price_histories:
        raise InvalidInputError("no trace is given", next_step="--trace FILE, with the file of a trace")
    repeated = {path for path in paths if paths.count(path) > 1}
    if repeated:
        raise InvalidInputError(f"--trace {min(repeated)} is given twice", next_step="name each trace once")
    asked = SimulatedJob(**job)
    traces = [read_trace(path) for path in paths]
    ratios: Floats | None = None
    if price_histories:
        traces, ratios = _with_prices(read_histories(price_histories), traces, nodes)
    names = NAMES if "all" in policy else tuple(dict.fromkeys(policy))
    with steps("policies", len(names) * (1 if together else len(traces))) as advance:
        results = replay(
            traces,
            asked,
            names,
            price_ratios=ratios,
            together=together,
            starts=starts,
            seed=seed,
            nodes=nodes,
            processes=len(os.sched_getaffinity(0)),
            told=advance,
        )
    title = "Policies over all traces together" if together else "Policies by trace"
    spare = ("trace", *_SPARE) if together else _SPARE
    write_rows([_row(result) for result in results], COLUMNS, output_format, title=title, spare=spare)
    if output_format == "table" and len(traces) > 1 and not together:
        click.echo()
        write_table(_means(results), _MEANS, title=f"Means over {len(paths)} traces", spare=_SPARE)


def _with_prices(history: PriceHistory, traces: list[CapacityTrace], nodes: int) -> tuple[list[CapacityTrace], Floats]:
    """The traces, or assumed ones, and on-demand's price over spot's in their pools and ticks."""
    catalog, zones = load(), ", ".join(zone.zone_name for zone in history.zones)
    prices = [
        offer.on_demand
        for offer in catalog.offers
        if offer.instance.name == history.instance_type and offer.on_demand
        if any(zone.zone_name[:-1] == offer.region or zone.zone_id in offer.zone_ids for zone in history.zones)
    ]
    if not prices:
        raise DataMissingError(
            f"the catalog has no on-demand price of {history.instance_type} in the region of {zones}",
            why="costs are shares of on-demand's",
            next_step=f"gpufleet catalog refresh --region {history.zones[0].zone_name[:-1]}",
        )
    on_demand = min(prices, key=lambda price: price.usd_per_hour)
    usd = f"{on_demand.usd_per_hour:g} USD an hour ({on_demand.source}, {on_demand.as_of})"
    notes: list[object] = [*history.skipped, f"on-demand {history.instance_type} costs {usd}"]
    if not traces:
        traces, left_out = assume_capacity(history, nodes=nodes)
        names = ", ".join(trace.name for trace in traces)
        notes += [
            *left_out,
            f"no trace is given: {names} are assumed to have capacity all the time: only prices differ",
        ]
    write_notes(notes)
    return traces, on_demand.usd_per_hour / usd_by_tick(history, traces)


def _row(result: PolicyFigures) -> dict[str, Any]:
    return {field: rounded(value) if isinstance(value, float) else value for field, value in asdict(result).items()}


def _means(results: Sequence[PolicyFigures]) -> list[dict[str, Any]]:
    rows = []
    for policy in dict.fromkeys(result.policy for result in results):
        of_policy = [asdict(result) for result in results if result.policy == policy]
        means = {field: float(np.mean([row[field] for row in of_policy])) for field in _MEANS if field != "policy"}
        rows.append({"policy": policy, **means})
    return rows
