"""Least cost of a policy without foresight in three pools, by dynamic programming over the state and age of each pool.

    python -m tests.benchmarks.spot_pools_bound TRACES_FOLDER

writes ``results/spot_pools_bound_<yyyymm>.md``. The model is that of ``spot_bound``, for three pools that are alike and
independent: capacity and its absence end at the rate of their age, 1 / (age + 0.4 h). ``adaptive`` knows of a pool only
what its own launches tell; these policies see all pools in each tick, so they bound what it can reach from below (but
for the coarse ages). ``known ends`` is told the end of each stretch as it begins: a bound that needs foresight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bootstrap.contract.adaptive import FIRST_AGE_HOURS, HAZARD
from bootstrap.contract.pool_policy import Event, Mode
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.omniscient import lower_bound_together
from optimizer.economics.simulation.traces import Trace, draw_places, read_trace
from optimizer.economics.simulation.zone_policies import ZONE_POLICIES, NewPolicy
from optimizer.economics.simulation.zones import Launching, ZoneView, simulate_together
from optimizer.performance.types import Bools, Floats, Ints
from tests.benchmarks.spot_bound import drawn
from tests.benchmarks.spot_zones import PRICE_RATIO, STARTS, WORK_HOURS, heading, write_results

DEADLINE_FACTOR = 1.2
POOLS = 3
RESTART_HOURS = 0.2
# A launch loads for two steps.
STEP_HOURS = RESTART_HOURS / 2
# Ages (or hours to a known end) of the grid; between them the cost is interpolated.
AGES = np.concatenate([[0], np.geomspace(0.2, 24, 8)])
# States of a pool: empty at each age, then with capacity at each age.
UP, STATES = len(AGES), 2 * len(AGES)
# Drawn groups of three pools.
GROUPS, GROUP_STARTS = 20, 24
LATE = np.float32(1e5)
WAIT, DEMAND, FIRST_POOL = range(3)
IDLE, WORKS, LOADS, SPOT_WORKS, SPOT_LOADS = range(5)

# The pools' order does not matter: choices are kept for sorted states, of spot nodes after their own pool's.
SORTED = list(combinations_with_replacement(range(STATES), POOLS))
OWN = list(product(range(UP, STATES), combinations_with_replacement(range(STATES), POOLS - 1)))
ROW = {states: row for row, states in enumerate(SORTED)}
ROW_OF_OWN = {(own, *others): row for row, (own, others) in enumerate(OWN)}


# Capacity of the gang in windows, shape (runs, pools, ticks), and hours of a tick.
Case = tuple[Bools, float]


class Table(NamedTuple):
    """Choices by hours to the deadline, situation, slack and row; ``known_ends`` tells what ages are."""

    choices: list[list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]]
    known_ends: bool


def moves(known_ends: bool) -> Floats:
    """Chances of a pool's next state, by its state."""
    scale, offset = HAZARD
    later = np.maximum(AGES - STEP_HOURS, 0) if known_ends else np.minimum(AGES + STEP_HOURS, AGES[-1])
    below = np.clip(np.searchsorted(AGES, later + 1e-9, side="right") - 1, 0, UP - 2)
    part = (later - AGES[below]) / (AGES[below + 1] - AGES[below])
    ends = 1 - ((AGES + offset) / (AGES + offset + STEP_HOURS)) ** scale
    begins = np.eye(UP)[0]
    if known_ends:
        ends = np.where(AGES < STEP_HOURS, 1.0, 0.0)
        longest = np.append((AGES[1:] + AGES[:-1]) / 2, np.inf)
        begins = np.diff(1 - (offset / (offset + longest)) ** scale, prepend=0)
    chances = np.zeros((STATES, STATES))
    for first, other in ((0, UP), (UP, 0)):
        for age in range(UP):
            row = chances[first + age]
            row[other : other + UP] = ends[age] * begins
            row[first + below[age]] += (1 - ends[age]) * (1 - part[age])
            row[first + below[age] + 1] += (1 - ends[age]) * part[age]
    return chances


def solve(job: Job, *, known_ends: bool = False) -> Table:
    """Backward induction, a step at a time, over slack, situation and the states of all pools."""
    steps = round(job.deadline_hours / STEP_HOURS)
    slacks = steps - round(job.work_hours / STEP_HOURS) + 1
    chances = moves(known_ends).astype(np.float32)
    step, spot_step = np.float32(STEP_HOURS), np.float32(STEP_HOURS / job.price_ratio)
    cost = np.zeros((5, slacks, *[STATES] * POOLS), dtype=np.float32)
    sorted_rows = tuple(np.array(SORTED).T)
    own_rows = (np.array([own for own, _ in OWN]), *np.array([others for _, others in OWN]).T)
    choices = []

    def slower(costs: Floats) -> Floats:
        return np.concatenate([np.full_like(costs[:1], LATE), costs[:-1]])

    for left in range(1, steps + 1):
        after = cost
        # The first pool is that of the spot nodes: where it is empty, they are gone.
        after[SPOT_WORKS:, :, :UP] = after[IDLE, :, :UP]
        for pool in range(POOLS):
            after = np.moveaxis(np.tensordot(after, chances, axes=(2 + pool, 1)), -1, 2 + pool)
        wait, launch = slower(after[IDLE]), step + slower(after[LOADS])
        works, spot = step + after[WORKS], spot_step + after[SPOT_WORKS]
        start, loads = spot_step + slower(after[SPOT_LOADS]), spot_step + slower(after[SPOT_WORKS])
        for costs in (spot, start, loads):
            costs[:, :UP] = LATE
        starts = [np.moveaxis(start, 1, 1 + pool) for pool in range(POOLS)]
        options = [(wait, demand, *starts) for demand in (launch, works, step + slower(after[WORKS]))]
        options += [(wait, launch, one, *starts[1:]) for one in (spot, loads)]
        cost = np.empty_like(cost)
        kept = []
        for situation, option in enumerate(options):
            best, choice = option[0].copy(), np.zeros(wait.shape, dtype=np.uint8)
            for number, costs in enumerate(option[1:], 1):
                better = costs < best
                best[better], choice[better] = costs[better], number
            cost[situation] = best
            kept.append(choice[:, *(own_rows if situation >= SPOT_WORKS else sorted_rows)])
        # Slack beyond the time that is left: the work is done.
        cost[:, left:] = 0
        choices.append(kept)
    return Table(choices, known_ends)


class Seeing:
    """Plays a table in one window under the guard of ``adaptive``."""

    beside = True

    def __init__(self, table: Table, has: Bools, gap_hours: float) -> None:
        self._table, self._has, self._gap_hours = table, has, gap_hours
        self._ages = np.full(has.shape, AGES[-1] if table.known_ends else FIRST_AGE_HOURS)
        ticks = has.shape[1]
        for tick in range(ticks - 2, -1, -1) if table.known_ends else range(1, ticks):
            last = tick + 1 if table.known_ends else tick - 1
            same = has[:, tick] == has[:, last]
            # A stretch whose end is known ends after this tick, at the earliest.
            other = gap_hours if table.known_ends else 0.0
            self._ages[:, tick] = np.where(same, self._ages[:, last] + gap_hours, other)
        self._goal: int | None = None

    def keep(self, view: ZoneView) -> Mode:
        """Look the choice up, and keep the deadline."""
        tick = round(view.elapsed_hours / self._gap_hours)
        has, slack = self._has[:, tick], view.left_hours - view.work_hours
        states: list[int] = (np.searchsorted((AGES[1:] + AGES[:-1]) / 2, self._ages[:, tick]) + UP * has).tolist()
        pools = sorted(range(POOLS), key=states.__getitem__)
        spot, loads = view.mode is Mode.SPOT, view.loading_hours > 0
        situation = IDLE if view.mode is Mode.IDLE else (SPOT_WORKS if spot else WORKS) + loads
        if spot:
            assert view.pool is not None
            pools.remove(view.pool)
            pools.insert(0, view.pool)
        row = (ROW_OF_OWN if spot else ROW)[tuple(states[pool] for pool in pools)]
        cell = int(np.clip(slack / STEP_HOURS + 1e-6, 0, self._table.choices[0][0].shape[0] - 1))
        left = min(int(np.ceil(view.work_hours / STEP_HOURS - 1e-6)) + cell, len(self._table.choices))
        choice = int(self._table.choices[left - 1][situation][cell, row])
        bound = view.delays.restart_bound_hours
        may_wait = slack - view.step_hours >= bound
        may_stay = spot and (may_wait if loads else slack >= bound)
        stays = spot and choice == FIRST_POOL
        if may_stay and (stays or (not loads and choice < FIRST_POOL)):
            return Mode.SPOT
        pool = pools[choice - FIRST_POOL]
        may_start = may_wait and slack >= bound + view.delays.restart_hours
        if choice >= FIRST_POOL and not stays and may_start and has[pool]:
            self._goal = pool
            return view.mode
        if may_stay:
            return Mode.SPOT
        return Mode.ON_DEMAND if choice == DEMAND or not may_wait else Mode.IDLE

    def next_try(self, view: ZoneView) -> int | None:
        """Return the pool of the choice."""
        goal, self._goal = self._goal, None
        return goal

    def note(self, event: Event, pool: int, hours: float) -> None:
        """Learn nothing: all is seen."""


def cut(groups: list[list[Trace]], job: Job, starts: int, gang: int) -> Case:
    """Windows of each group's common time."""
    parts = []
    for traces in groups:
        shortest = min(traces, key=lambda trace: len(trace.nodes))
        places: Ints = draw_places(shortest, job.deadline_hours, starts, np.random.default_rng(0))
        parts.append(np.stack([(trace.nodes >= gang)[places] for trace in traces], axis=1))
    return np.concatenate(parts), groups[0][0].gap_s / 3600


def seeing(table: Table, has: Bools, gap_hours: float) -> NewPolicy:
    """Make a policy for one window after the other."""
    rest: Iterator[Bools] = iter(has)
    return lambda pools, job: Seeing(table, next(rest), gap_hours)


def play(job: Job, cases: Sequence[Case], new_policy: Callable[[Bools, float], NewPolicy]) -> list[float]:
    """Mean cost in each case, as a share of the work on demand."""
    costs = []
    for has, gap_hours in cases:
        new, prices = new_policy(has, gap_hours), np.full(has.shape[:2], 1 / job.price_ratio)
        runs = simulate_together(has, gap_hours, job, Launching(try_hours=2 / 60), prices, new, seed=0).runs
        assert not runs.late.any()
        costs.append(float(runs.cost.mean()) / job.work_hours)
    return costs


def main(folder: Path) -> None:
    """Play all and write the page."""
    zones = [read_trace(path) for path in sorted(folder.glob("availability*"))]
    alike = [[drawn(POOLS * group + pool, 300) for pool in range(POOLS)] for group in range(GROUPS)]
    titles = (f"drawn from the curve ({GROUPS})", "AWS 2023, 1 node", "AWS 2023, 16 nodes")
    columns = ("bound", "adaptive", "all pools seen", "known ends")
    lines = ["# How cheap a policy without foresight can be in three pools", "", *_ABOUT]
    lines += heading("Mean cost, share of 48 h of on-demand (over the bound)", ("pools", *columns))
    rows: list[dict[str, object]] = []
    job = Job(
        work_hours=WORK_HOURS,
        deadline_hours=DEADLINE_FACTOR * WORK_HOURS,
        price_ratio=PRICE_RATIO,
        restart_hours=RESTART_HOURS,
    )
    cases = [cut(alike, job, GROUP_STARTS, 1), *(cut([zones], job, STARTS, gang) for gang in (1, 16))]
    bounds = []
    for has, gap_hours in cases:
        prices = np.full(has.shape[:2], 1 / PRICE_RATIO)
        bounds.append(float(lower_bound_together(has, 3600 * gap_hours, job, prices).cost.mean()) / WORK_HOURS)
    played = [bounds, play(job, cases, lambda has, gap_hours: ZONE_POLICIES["adaptive"])]
    played += [play(job, cases, partial(seeing, solve(job, known_ends=known))) for known in (False, True)]
    for title, *costs in zip(titles, *played, strict=True):
        cells = " | ".join(f"{cost:.3f} (×{cost / costs[0]:.3f})" for cost in costs)
        lines.append(f"| {title} | {cells} |")
        rows.append({"pools": title} | dict(zip(columns, costs, strict=True)))
        print(lines[-1], flush=True)
    write_results("spot_pools_bound", lines, rows)


_ABOUT = [
    f"`python -m tests.benchmarks.spot_pools_bound TRACES`: {STARTS} starts ({GROUP_STARTS} in each drawn group of "
    f"three pools), {WORK_HOURS:g} h of work within {DEADLINE_FACTOR} times that, restart "
    f"{RESTART_HOURS:g} h, on-demand {PRICE_RATIO} × spot, no deadline missed. Columns: adaptive as it "
    "ships, which knows a pool by its own launches (two minutes a refusal); the "
    f"dynamic programme with the shipped curve (steps of 6 minutes, {len(AGES)} ages a pool, losses while nodes load), "
    "which sees all pools all the time; that one told the end of each stretch as it begins (foresight).",
]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
