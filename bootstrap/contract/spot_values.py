"""Finite-horizon values of the spot policy: what spot saves a run on demand, and whether a run without nodes waits.

Dynamic programming over work left, slack left, age and what runs, with all pools as one whose capacity comes and goes
at the rate of ``pools``. Slack is the time to the deadline beyond the work: only waiting, launches and lost work spend
it. The age is that of the capacity, or of the drought. Costs are hours of on-demand.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bootstrap.contract.pools import YOUNG_S
from bootstrap.contract.timings import ASK_AGAIN, BOOT, ENDING, HOUR, TICK

# Lower ends of the age bins, h.
AGES = (0.0, 0.5, 1.5, 4.5, 13.5)
_EDGES = AGES[1:]
# Cells (work x slack) of a table.
_CELLS = 4000
_SHORTEST_STEP_HOURS = 0.1
# Cost of states that the guard forbids.
_LATE = 1e6
# Situations: no nodes, on-demand and spot while there is capacity; no nodes and on-demand without.
_NONE_UP, _DEMAND_UP, _SPOT_UP, _NONE_DOWN, _DEMAND_DOWN = range(5)
_Costs = tuple[float, ...]
_BINS = range(len(AGES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Delays of a run, h.

    Attributes:
        restart_hours: mean time from a launch to the first new step.
        restart_bound_hours: time that a launch never exceeds, for the guard.
        lost_bound_hours: work that a reclaim can lose: the checkpoint interval.
    """

    restart_hours: float
    restart_bound_hours: float
    lost_bound_hours: float

    @classmethod
    def of_run(cls, *, drain_s: float, gang_window_s: float, lost_bound_hours: float) -> Delays:
        """Return the delays of a run whose nodes the controller moves.

        On-demand nodes may be bought after a drain, two more ticks and a wait, and come at the end of the gang window.
        """
        bound = timedelta(seconds=drain_s + gang_window_s) + ENDING + 2 * TICK + ASK_AGAIN
        return cls(restart_hours=BOOT / HOUR, restart_bound_hours=bound / HOUR, lost_bound_hours=lost_bound_hours)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Fixed terms of a run.

    Attributes:
        work_hours, deadline_hours: at the start.
        spot_price: of an hour; on-demand's is 1.
        return_factor: rate at which the first of all pools comes back, over one pool's.
    """

    work_hours: float
    deadline_hours: float
    spot_price: float
    delays: Delays
    return_factor: float


class _Tables(NamedTuple):
    """Savings and waits by work left, slack left and age; a step is the work and the slack of a cell."""

    step_hours: float
    work_cells: int
    slack_cells: int
    savings: array[float]
    waits: bytearray

    def cell(self, work_hours: float, slack_hours: float, age_hours: float) -> int:
        """Place of a state: slack is rounded down and work up, against the policy."""
        work = min(max(int(work_hours / self.step_hours + 1 - 1e-9), 0), self.work_cells)
        slack = min(max(int(slack_hours / self.step_hours), 0), self.slack_cells)
        return (work * (self.slack_cells + 1) + slack) * len(AGES) + bisect_right(_EDGES, age_hours)


def should_wait(terms: Terms, *, work_hours: float, slack_hours: float, drought_hours: float) -> bool:
    """Return whether a run without nodes, whose pools are empty since ``drought_hours``, waits rather than buys."""
    tables = _solve(terms)
    return bool(tables.waits[tables.cell(work_hours, slack_hours, drought_hours)])


def spot_saving(terms: Terms, *, work_hours: float, slack_hours: float, age_hours: float) -> float:
    """Return what spot capacity of this age saves a run on demand, in hours of on-demand; negative where it costs."""
    tables = _solve(terms)
    return tables.savings[tables.cell(work_hours, slack_hours, age_hours)]


@lru_cache(maxsize=64)
def _solve(terms: Terms) -> _Tables:
    """Find the savings and waits of every cell by backward induction. A launch takes its mean restart at once."""
    slack_hours = terms.deadline_hours - terms.work_hours
    step = max(math.sqrt(terms.work_hours * slack_hours / _CELLS), _SHORTEST_STEP_HOURS)
    work_cells, slack_cells = math.ceil(terms.work_hours / step), math.ceil(slack_hours / step)
    spot_price, restart = terms.spot_price, terms.delays.restart_hours
    bound, lost = terms.delays.restart_bound_hours, terms.delays.lost_bound_hours
    loses, comes = _chances(1.0, step), _chances(terms.return_factor, step)
    growth = [
        (min(age + 1, len(AGES) - 1), min(step / (end - start), 1.0))
        for age, (start, end) in enumerate(pairwise((*AGES, math.inf)))
    ]
    launch_cells, part = int(restart / step), restart / step % 1.0
    slacks = range(slack_cells + 1)
    savings, waits = array("f", bytes(4 * len(AGES) * len(slacks))), bytearray(len(AGES) * len(slacks))

    def later(costs: list[_Costs], age: int, situation: int) -> float:
        """Cost after a step without a change: some of an age bin reach the next one."""
        older, grow = growth[age]
        return costs[age][situation] + grow * (costs[older][situation] - costs[age][situation])

    before: list[list[_Costs]] = [[(0.0,) * 5] * len(AGES) for _ in slacks]
    for _ in range(work_cells):
        # Costs by slack and age: of all situations, and of a step of work that begins on-demand or on spot with
        # capacity, or on-demand without.
        values: list[list[_Costs]] = []
        runs: list[list[tuple[float, float, float]]] = []
        for cell in slacks:
            slack, after = cell * step, before[cell]
            # An interruption loses half of the interval on average.
            reclaimed = after[0][_NONE_DOWN] + lost / 2
            run = [
                (
                    step + (1 - loses[age]) * later(after, age, _DEMAND_UP) + loses[age] * after[0][_DEMAND_DOWN],
                    step * spot_price + (1 - loses[age]) * later(after, age, _SPOT_UP) + loses[age] * reclaimed,
                    step + (1 - comes[age]) * later(after, age, _DEMAND_DOWN) + comes[age] * after[0][_DEMAND_UP],
                )
                for age in _BINS
            ]
            runs.append(run)
            near, far = runs[max(cell - launch_cells, 0)], runs[max(cell - launch_cells - 1, 0)]
            waited = values[cell - 1] if cell and slack - step >= bound else None
            here: list[_Costs] = []
            for age in _BINS:
                demand_up, spot_up, demand_down = run[age]
                buy_up, take, buy_down = (
                    restart * price + close + part * (distant - close)
                    for price, close, distant in zip((1, spot_price, 1), near[age], far[age], strict=True)
                )
                launch = take if slack >= bound + restart + lost else _LATE
                wait_up = wait_down = _LATE
                if waited:
                    wait_up = (1 - loses[age]) * later(waited, age, _NONE_UP) + loses[age] * waited[0][_NONE_DOWN]
                    wait_down = (1 - comes[age]) * later(waited, age, _NONE_DOWN) + comes[age] * waited[0][_NONE_UP]
                here.append(
                    (
                        min(wait_up, buy_up, launch),
                        min(wait_up, demand_up, launch),
                        min(wait_up, buy_up, spot_up if slack >= bound + lost else _LATE),
                        min(wait_down, buy_down),
                        min(wait_down, demand_down),
                    )
                )
                savings.append(demand_up - launch)
                waits.append(wait_down <= buy_down)
            values.append(here)
        before = values
    return _Tables(step, work_cells, slack_cells, savings, waits)


def _chances(factor: float, step: float) -> list[float]:
    """Chance of a change within a step, by age bin: the mean rate over the bin."""
    young = YOUNG_S / 3600
    chances = []
    for start, end in pairwise((*AGES, 3 * AGES[-1])):
        rate = factor * math.log((end + young) / (start + young)) / (end - start)
        chances.append(1 - math.exp(-rate * step))
    return chances
