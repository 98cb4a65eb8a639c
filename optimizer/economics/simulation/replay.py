"""All policies over all traces, and the figures of each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context

import numpy as np

from optimizer.economics.simulation.engine import Runs, simulate
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.traces import Trace, Windows, cut_windows
from optimizer.performance.types import Floats

OMNISCIENT = "omniscient"
NAMES = (*POLICIES, OMNISCIENT)
# Ticks times runs above which the simulation is worth the start of a second process.
_WORTH_PROCESSES = 2e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of one policy on one trace; costs are shares of on-demand's from start to end."""

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


def replay(
    traces: Sequence[Trace],
    job: Job,
    policies: Iterable[str],
    *,
    starts: int,
    seed: int,
    nodes: int = 1,
    processes: int,
    told: Callable[[str], object] = lambda _: None,
) -> list[Result]:
    """Simulate each of ``policies`` (of NAMES) from ``starts`` places of each trace.

    ``told`` gets the policy's name after it has been played on all traces of one tick length.

    Raises:
        InvalidInputError: a trace is shorter than the deadline.
    """
    chosen = list(policies)
    tasks: list[tuple[str, Windows, Job, int]] = []
    groups: list[list[Trace]] = []
    # Traces with the same tick are played together.
    for _, group in groupby(sorted(traces, key=_gap), key=_gap):
        groups.append(list(group))
        windows = cut_windows(groups[-1], hours=job.deadline_hours, starts=starts, seed=seed, nodes=nodes)
        tasks += [(policy, windows, job, seed) for policy in chosen]
    size = sum(windows.available.size for _, windows, _, _ in tasks)
    # The longest first, so that no process is left with one at the end.
    order = sorted(range(len(tasks)), key=lambda place: -tasks[place][1].available.shape[1])
    played = {}
    with ExitStack() as stack:
        play_all: Callable[..., Iterable[Runs]] = map
        if processes > 1 and size > _WORTH_PROCESSES:
            play_all = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("fork"))).map
        for place, runs in zip(order, play_all(_play, [tasks[place] for place in order]), strict=True):
            played[place] = runs
            told(tasks[place][0])
    results = {}
    for place, (policy, _, _, _) in enumerate(tasks):
        for number, trace in enumerate(groups[place // len(chosen)]):
            rows = slice(number * starts, (number + 1) * starts)
            results[trace.name, policy] = summarise(trace.name, policy, played[place], rows, job)
    return [results[trace.name, policy] for trace in traces for policy in chosen]


def _gap(trace: Trace) -> float:
    return trace.gap_s


def _play(task: tuple[str, Windows, Job, int]) -> Runs:
    policy, windows, job, seed = task
    if policy == OMNISCIENT:
        return lower_bound(windows, job)
    return simulate(windows, job, POLICIES[policy](), seed=seed)


def summarise(trace: str, policy: str, runs: Runs, rows: slice, job: Job) -> Result:
    """Figures of the runs in ``rows``."""
    costs: Floats = runs.cost[rows] / job.on_demand_cost
    return Result(
        trace=trace,
        policy=policy,
        starts=len(costs),
        mean_normalised_cost=float(costs.mean()),
        normalised_cost_p50=float(np.quantile(costs, 0.5)),
        normalised_cost_p95=float(np.quantile(costs, 0.95)),
        missed_fraction=float(runs.late[rows].mean()),
        spot_hours=float(runs.spot_hours[rows].mean()),
        on_demand_hours=float(runs.on_demand_hours[rows].mean()),
        interruptions=float(runs.interruptions[rows].mean()),
    )
