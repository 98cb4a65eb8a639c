"""All policies over all traces, one pool a run or all pools for each run, and the figures of each pair."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.simulator import SimulatedJob, simulate
from optimizer.economics.simulation.traces import CapacityTrace, draw_places
from optimizer.performance.types import Bools, Floats

OMNISCIENT = "omniscient"
NAMES = (*POLICIES, OMNISCIENT)
_MEANS = ("spot_hours", "on_demand_hours", "interruptions", "refusals", "moves")
# Ticks times runs above which the simulation is worth the start of a second process.
_WORTH_PROCESSES = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFigures:
    """Means of one policy's ``Runs`` on one trace, or on several together; costs are shares of on-demand's."""

    trace: str
    policy: str
    starts: int
    mean_normalised_cost: float
    normalised_cost_p50: float
    normalised_cost_p95: float
    missed_fraction: float
    spot_hours: float
    on_demand_hours: float
    interruptions: float
    refusals: float | None
    moves: float | None


def replay(
    traces: Sequence[CapacityTrace],
    job: SimulatedJob,
    policies: Iterable[str],
    *,
    starts: int,
    seed: int,
    price_ratios: Sequence[float] | Floats | None = None,
    together: bool = False,
    nodes: int = 1,
    processes: int = 1,
    told: Callable[[str], object] = lambda _: None,
) -> list[PolicyFigures]:
    """Simulate each of ``policies`` (of NAMES) from ``starts`` places of each trace, or of all traces ``together``.

    Together, every run meets the pools in an order of its own, so that no policy gains from the order of the files.
    ``price_ratios`` are on-demand's price over each pool's spot price, shape (pools,) or (pools, ticks); by default the
    job's. ``told`` gets the policy's name after it has been played on a trace.

    Raises:
        InvalidInputError: the traces do not fit together, or one is shorter than the deadline.
    """
    chosen = list(policies)
    ratios = np.asarray([job.price_ratio] * len(traces) if price_ratios is None else price_ratios, dtype=float)
    groups = [list(range(len(traces)))] if together else [[place] for place in range(len(traces))]
    tasks = []
    for group in groups:
        members = [traces[place] for place in group]
        available, prices = _cut(members, 1 / ratios[group], job.deadline_hours, starts=starts, seed=seed, nodes=nodes)
        name = counted(len(members), "trace") if together else members[0].name
        tasks += [(name, policy, available, prices, members[0].gap_s) for policy in chosen]
    size = sum(available.size for _, _, available, *_ in tasks)
    figures = []
    with ExitStack() as stack:
        play_all: Callable[..., Iterable[PolicyFigures]] = map
        if processes > 1 and size > _WORTH_PROCESSES:
            play_all = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("fork"))).map
        for row in play_all(partial(_play, job, seed), tasks):
            figures.append(row)
            told(row.policy)
    return figures


def _play(job: SimulatedJob, seed: int, task: tuple[str, str, Bools, Floats, float]) -> PolicyFigures:
    """Play a policy in all windows of a trace, or of several together; shapes as ``simulate`` has them."""
    trace, policy, available, prices, gap_s = task
    if policy == OMNISCIENT:
        runs = lower_bound(available, gap_s, job, prices)
    else:
        runs = simulate(available, gap_s / 3600, job, prices, POLICIES[policy], seed=seed)
    costs: Floats = runs.cost / job.on_demand_cost
    columns = ((name, getattr(runs, name)) for name in _MEANS)
    means: dict[str, Any] = {name: None if values is None else float(values.mean()) for name, values in columns}
    return PolicyFigures(
        trace=trace,
        policy=policy,
        starts=len(costs),
        mean_normalised_cost=float(costs.mean()),
        normalised_cost_p50=float(np.quantile(costs, 0.5)),
        normalised_cost_p95=float(np.quantile(costs, 0.95)),
        missed_fraction=float(runs.late.mean()),
        **means,
    )


def _cut(
    traces: Sequence[CapacityTrace], prices: Floats, hours: float, *, starts: int, seed: int, nodes: int
) -> tuple[Bools, Floats]:
    """Availability of windows at random places, the same of all traces, and prices, as ``simulate`` takes them.

    The places of one trace depend on the seed and its name only, not on the other traces.
    """
    _check_fit(traces)
    name = [] if len(traces) > 1 else [zlib.crc32(traces[0].name.encode())]
    shortest = min(traces, key=lambda trace: len(trace.nodes))
    places = draw_places(shortest, hours, starts, np.random.default_rng([seed, *name]))
    available = np.stack([(trace.nodes >= nodes)[places] for trace in traces], axis=1)
    random = np.random.default_rng([seed, len(traces)])
    order = random.permuted(np.tile(np.arange(len(traces)), (starts, 1)), axis=1)
    available = np.take_along_axis(available, order[:, :, None], axis=1)
    if prices.ndim == 1:
        return available, prices[order]
    return available, np.take_along_axis(prices[:, places].transpose(1, 0, 2), order[:, :, None], axis=1)


def _check_fit(traces: Sequence[CapacityTrace]) -> None:
    gaps = {f"{trace.gap_s:g} s" for trace in traces}
    begins = {str(trace.start_time) for trace in traces if trace.start_time}
    for what, found in (("have ticks of", gaps), ("begin at", begins)):
        if len(found) > 1:
            raise InvalidInputError(
                f"the traces {what} {', '.join(sorted(found))}",
                limit="the same for all",
                why="pools that are taken together are watched at the same times",
                next_step="traces of one collection",
            )
