"""How cheap a policy without foresight can be in one pool: exact dynamic programming, played on the published traces.

    python -m tests.benchmarks.spot_bound TRACES_FOLDER

writes ``results/spot_bound_<yyyymm>.md``. The model is semi-Markov: capacity, and its absence, end at a rate that
depends on their age alone. ``adaptive`` solves a coarse table of it in pure Python; here time, slack and age have fine
grids, a launch may be lost while it loads, and the rates come from

- the shipped curve, 1 / (age + 0.4 h);
- the traces of the other families, by age, without a form;
- the judged trace itself, by age: no policy can know these rates, so this is a bound of the model, not a policy;
- the same rates and the end of each stretch, known from its first moment: a bound that needs foresight.

Traces drawn from the shipped curve tell what is lost even where the model is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bootstrap.contract.adaptive import FIRST_AGE_HOURS, HAZARD, IDLE, ON_DEMAND, SPOT
from optimizer.economics.simulation.engine import Policy, View, simulate
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import Adaptive
from optimizer.economics.simulation.traces import Trace, Windows, cut_windows, read_trace
from optimizer.performance.types import Floats, Ints
from tests.benchmarks.spot_policies import FAMILIES, PRICE_RATIO, RESTART_HOURS, WORK_HOURS
from tests.benchmarks.spot_zones import heading, write_results

DEADLINES = (1.08, 1.2)
STARTS = 100
# A launch loads for two steps.
STEP_HOURS = RESTART_HOURS / 2
# Ages (or hours to a known end) of the grid; between them the cost is interpolated.
AGES = np.concatenate([[0], np.geomspace(STEP_HOURS, 60, 32)])
# Ends of the age bins of a rate without a form, h, and events that the shipped curve weighs in each.
BINS = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 1e3])
PRIOR_EVENTS = 5.0
# Situations with capacity (waiting, on-demand that works or loads, spot that works or loads) and, from DOWN, without.
LOADS_ON_DEMAND, SPOT_WORKS, SPOT_LOADS, DOWN = 2, 3, 4, 5
LATE = 1e6

Rate = Callable[[Floats], Floats]


class Model(NamedTuple):
    """Rates of losing capacity and of its return by age, 1/h."""

    loss: Rate
    back: Rate


def curve() -> Model:
    """The shipped curve."""
    scale, offset = HAZARD
    return Model(*[lambda age: scale / (age + offset)] * 2)


def by_age(traces: Sequence[Trace]) -> Model:
    """Events over time in each age bin, with PRIOR_EVENTS of the curve."""
    events, hours = np.zeros((2, len(BINS) - 1)), np.zeros((2, len(BINS) - 1))
    for trace in traces:
        has = trace.nodes > 0
        edges = [0, *(np.flatnonzero(np.diff(has)) + 1), len(has)]
        # Nobody knows when the first stretch began.
        for begin, end in list(pairwise(edges))[1:]:
            length, kind = (end - begin) * trace.gap_s / 3600, int(has[begin])
            hours[kind] += np.clip(length - BINS[:-1], 0, np.diff(BINS))
            if end < len(has):
                events[kind, np.searchsorted(BINS, length - trace.gap_s / 7200, side="right") - 1] += 1
    last = np.minimum(BINS[1:], 2 * BINS[-2])
    scale, offset = HAZARD
    prior = scale * np.log((last + offset) / (BINS[:-1] + offset)) / (last - BINS[:-1])
    rates = (events + PRIOR_EVENTS) / (hours + PRIOR_EVENTS / prior)
    lost, back = (lambda age, kind=kind: rates[kind][np.searchsorted(BINS, age, side="right") - 1] for kind in (1, 0))
    return Model(lost, back)


def solve(job: Job, model: Model, *, known_ends: bool = False) -> Any:
    """Cheapest choice by hours to the deadline, slack, situation and age: backward induction, a step at a time.

    With ``known_ends`` the last index is the time to the end of the stretch, drawn when it begins.
    """
    steps = round(job.deadline_hours / STEP_HOURS)
    slacks = steps - round(job.work_hours / STEP_HOURS) + 1
    spot_step = STEP_HOURS / job.price_ratio
    moved = np.maximum(AGES - STEP_HOURS, 0) if known_ends else np.minimum(AGES + STEP_HOURS, AGES[-1])
    below = np.clip(np.searchsorted(AGES, moved, side="right") - 1, 0, len(AGES) - 2)
    part = (moved - AGES[below]) / (AGES[below + 1] - AGES[below])
    if known_ends:
        ends = [np.where(AGES < STEP_HOURS, 1.0, 0.0)] * 2
        begins = [_lengths(rate) for rate in model]
    else:
        fine = AGES[:, None] + STEP_HOURS * (np.arange(8) + 0.5) / 8
        ends = [1 - np.exp(-rate(fine).mean(axis=1) * STEP_HOURS) for rate in model]
        begins = [np.eye(len(AGES))[0]] * 2
    cost = np.zeros((2 * DOWN - 2, slacks, len(AGES)))
    choices = np.zeros((steps + 1, 2 * DOWN - 2, slacks, len(AGES)), dtype=np.uint8)
    for left in range(1, steps + 1):
        aged = cost[:, :, below] * (1 - part) + cost[:, :, below + 1] * part

        def after(situation: int, aged: Floats = aged, cost: Floats = cost) -> Floats:
            down = situation >= DOWN
            if down:
                changed = situation - DOWN
            else:
                changed = DOWN if situation in (IDLE, SPOT_WORKS, SPOT_LOADS) else DOWN + situation
            fresh = cost[changed] @ begins[0 if down else 1]
            end = ends[down]
            kept: Floats = (1 - end) * aged[situation] + end * fresh[:, None]
            return kept

        def slower(costs: Floats) -> Floats:
            return np.concatenate([np.full((1, len(AGES)), LATE), costs[:-1]])

        options: list[tuple[Floats, ...]] = []
        for first in (0, DOWN):
            wait, launch = slower(after(first)), STEP_HOURS + slower(after(first + LOADS_ON_DEMAND))
            works = STEP_HOURS + after(first + ON_DEMAND)
            demand = (launch, works, slower(works))
            if first:
                options += [(wait, one) for one in demand]
            else:
                spot = spot_step + after(SPOT_WORKS)
                starts = spot_step + slower(after(SPOT_LOADS))
                options += [(wait, one, starts) for one in demand]
                options += [(wait, launch, one) for one in (spot, slower(spot))]
        new = np.empty_like(cost)
        for situation, option in enumerate(options):
            stacked = np.stack(option)
            choices[left, situation] = stacked.argmin(axis=0)
            new[situation] = stacked.min(axis=0)
        # Slack beyond the time that is left: the work is done.
        new[:, left:] = 0
        cost = new
    return choices


def _lengths(rate: Rate) -> Floats:
    """Chances of the grid's lengths of a stretch."""
    bounds = np.concatenate([[0], (AGES[1:] + AGES[:-1]) / 2])
    fine = np.linspace(0, AGES[-1], 60001)
    survival = np.exp(-np.concatenate([[0], np.cumsum(rate(fine[:-1]) * np.diff(fine))]))
    chances: Floats = -np.diff(np.append(np.interp(bounds, fine, survival), 0))
    return chances


class Solved(Policy):
    """Plays tables of ``solve``, one for each run or one for all, under the guard of ``adaptive``."""

    def __init__(self, tables: Sequence[Any], which: Ints, windows: Windows, *, known_ends: bool = False) -> None:
        self._tables, self._which, self._tick = tables, which, 0
        self._ages = _ends_in(windows) if known_ends else _ages(windows)

    def decide(self, view: View) -> Ints:
        """Look the choice up, and keep the deadline."""
        job, slack, loads = view.job, view.left_hours - view.work_hours, view.loading_hours > 0
        age = np.searchsorted((AGES[1:] + AGES[:-1]) / 2, self._ages[:, self._tick])
        self._tick += 1
        last = self._tables[0].shape[2] - 1
        slack_cell = np.clip(np.floor(slack / STEP_HOURS + 1e-6).astype(int), 0, last)
        left = np.ceil(view.work_hours / STEP_HOURS - 1e-6).astype(int) + slack_cell
        demand, spot = (view.mode == ON_DEMAND) * (1 + loads), (view.mode == SPOT) * (SPOT_WORKS + loads)
        situation = np.where(view.available, demand + spot, DOWN + demand)
        wanted = np.empty(len(slack), dtype=int)
        for number, table in enumerate(self._tables):
            rows = self._which == number
            at = np.minimum(left[rows], len(table) - 1)
            wanted[rows] = table[at, situation[rows], slack_cell[rows], age[rows]]
        bound = job.restart_bound_hours
        may_wait = slack - view.gap_hours >= bound
        keeps = np.where(loads, may_wait, slack >= bound)
        may_spot = np.where(view.mode == SPOT, keeps, may_wait & (slack >= bound + job.restart_hours)) & view.available
        wanted = np.where((wanted == SPOT) & ~may_spot, IDLE, wanted)
        wanted = np.where((view.mode == SPOT) & may_spot & ~loads, SPOT, wanted)
        chosen: Ints = np.where((wanted == IDLE) & ~may_wait, ON_DEMAND, wanted)
        return chosen


def _ages(windows: Windows) -> Floats:
    """Age of the present state in each tick."""
    ages: Floats = np.full(windows.available.shape, FIRST_AGE_HOURS)
    for tick in range(1, windows.available.shape[1]):
        same = windows.available[:, tick] == windows.available[:, tick - 1]
        ages[:, tick] = np.where(same, ages[:, tick - 1] + windows.gap_s / 3600, 0)
    return ages


def _ends_in(windows: Windows) -> Floats:
    """Hours to the end of the present state, or of the window, in each tick."""
    hours: Floats = np.full(windows.available.shape, AGES[-1])
    for tick in range(windows.available.shape[1] - 2, -1, -1):
        same = windows.available[:, tick] == windows.available[:, tick + 1]
        hours[:, tick] = np.where(same, hours[:, tick + 1], 0) + windows.gap_s / 3600
    return hours


def drawn(number: int, hours: float) -> Trace:
    """Draw a trace from the shipped curve: both kinds of stretches are Lomax of shape 1."""
    random, gap_s, ticks = np.random.default_rng(number), 360.0, 0
    parts: list[Ints] = []
    has = number % 2
    while ticks * gap_s / 3600 < hours:
        length = HAZARD[1] * (1 / random.random() - 1)
        parts.append(np.full(int(np.ceil(min(length, hours) * 3600 / gap_s)), has))
        ticks, has = ticks + len(parts[-1]), 1 - has
    return Trace(name=f"drawn-{number}", gap_s=gap_s, nodes=np.concatenate(parts))


def play(traces: Sequence[Trace], factor: float, shipped: Any, others: Any) -> dict[str, float]:
    """Mean cost of each policy, as a share of 48 h of on-demand; drawn traces (``others`` None) have the curve only."""
    job = _job(factor)
    total: dict[str, float] = {}
    for gap_s in sorted({trace.gap_s for trace in traces}):
        group = [trace for trace in traces if trace.gap_s == gap_s]
        windows = cut_windows(group, hours=job.deadline_hours, starts=STARTS, seed=0)
        which, same = np.repeat(np.arange(len(group)), STARTS), np.zeros(len(group) * STARTS, dtype=int)
        policies: dict[str, Policy] = {"adaptive": Adaptive(), "curve": Solved([shipped], same, windows)}
        if others is None:
            known = solve(job, curve(), known_ends=True)
            policies["known ends"] = Solved([known], same, windows, known_ends=True)
        else:
            policies["other families"] = Solved([others], same, windows)
            own = [by_age([trace]) for trace in group]
            policies["itself"] = Solved([solve(job, model) for model in own], which, windows)
            known_own = [solve(job, model, known_ends=True) for model in own]
            policies["known ends"] = Solved(known_own, which, windows, known_ends=True)
        total["bound"] = total.get("bound", 0) + lower_bound(windows, job).cost.sum()
        for name, policy in policies.items():
            runs = simulate(windows, job, policy, seed=0)
            assert not runs.late.any()
            total[name] = total.get(name, 0) + runs.cost.sum()
    return {name: float(cost) / len(traces) / STARTS / WORK_HOURS for name, cost in total.items()}


def _job(factor: float) -> Job:
    return Job(
        work_hours=WORK_HOURS,
        deadline_hours=factor * WORK_HOURS,
        price_ratio=PRICE_RATIO,
        restart_hours=RESTART_HOURS,
    )


def main(folder: Path) -> None:
    """Play all and write the page."""
    families = {family: [read_trace(path) for path in sorted(folder.glob(f"{family}*.json"))] for family in FAMILIES}
    columns = ("bound", "adaptive", "curve", "other families", "itself", "known ends")
    lines = ["# How cheap a policy without foresight can be in one pool", "", *_ABOUT]
    lines += heading("Mean cost, share of 48 h of on-demand (over the bound)", ("traces", "deadline", *columns))
    rows: list[dict[str, object]] = []

    def add(title: str, factor: float, costs: dict[str, float]) -> None:
        cells = [
            f"{costs[name]:.3f} (×{costs[name] / costs['bound']:.3f})" if name in costs else "" for name in columns
        ]
        lines.append(f"| {title} | {factor}× | {' | '.join(cells)} |")
        rows.append({"traces": title, "deadline": factor} | {name: costs.get(name, "") for name in columns})
        print(lines[-1], flush=True)

    for factor in DEADLINES:
        shipped = solve(_job(factor), curve())
        by_family = {}
        for family, traces in families.items():
            rest = [trace for other in families if other != family for trace in families[other]]
            by_family[family] = play(traces, factor, shipped, solve(_job(factor), by_age(rest)))
            add(f"{FAMILIES[family]} ({len(traces)})", factor, by_family[family])
        aws = [family for family in families if not family.startswith("gcp")]
        sizes = [len(families[family]) for family in aws]
        means = {
            name: float(np.average([by_family[family][name] for family in aws], weights=sizes)) for name in columns
        }
        add(f"**all AWS** ({sum(sizes)})", factor, means)
        add("drawn from the curve (30)", factor, play([drawn(n, 400) for n in range(30)], factor, shipped, None))
    write_results("spot_bound", lines, rows)


_ABOUT = [
    f"`python -m tests.benchmarks.spot_bound TRACES`: {STARTS} starts a trace, {WORK_HOURS:g} h of work on one node, "
    f"restart {RESTART_HOURS:g} h, on-demand {PRICE_RATIO} × spot, no deadline missed. Columns: adaptive as it ships; "
    "the exact dynamic programme (steps of 6 minutes, 33 ages, losses while nodes load) with the shipped curve, with "
    "rates by age of the other families, and with those of the judged trace itself (a bound of the model, no policy); "
    "last, that one told the end of each stretch of capacity or drought as it begins (foresight; for drawn traces with "
    "the curve).",
]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
