"""The adaptive spot policy for one pool: idle, on-demand or spot until the next tick. Pure, so that all can run it.

Capacity comes and goes with a hazard that falls with age: a pool that has had capacity for a day keeps it longer than
one that has had it for ten minutes, and droughts are alike. HAZARD is that curve; a factor, learned from the pool's own
events, scales it. Dynamic programming over (work left, slack left, age, what runs) finds the cheapest choice in each
state. Slack is the time to the deadline beyond the work; only waiting, launches and lost work spend it. A guard keeps
the deadline whatever the pool does and the table says.

Numbers may be floats or arrays of them: ``Arithmetic`` holds the three operations that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from bootstrap.contract.pools import YOUNG_S

IDLE, ON_DEMAND, SPOT = range(3)

# A float, int or bool, or an array of them.
Number = Any

# Hazard, 1/h, of losing capacity at an age a, h, since it came, and of its return at an age since it went:
# HAZARD[0] / (a + HAZARD[1]), the curve of pools.py. tests/benchmarks/results/spot_policies_202611.md judges each
# family of published traces with the curve of the others: c 1.1 to 1.3, b 0.6 to 0.75 h, and the same costs.
HAZARD = (1.0, YOUNG_S / 3600)
# Events that a prior (the curve, or a Spot Advisor band) weighs beside the pool's own.
LEARNED_FROM = 10.0
# Age at which a Spot Advisor band is compared with the curve: its instances have lived for days.
BAND_AGE_HOURS = 24.0
# Age of the first availability that is seen: nobody knows when it began.
FIRST_AGE_HOURS = 0.5

# Lower ends of the age bins, h.
AGES = (0.0, 0.5, 1.5, 4.5, 13.5)
# Factors that tables are made for, and the bounds between them.
_FACTORS = (0.1, 0.4, 1.0, 2.5)
_BOUNDS = (0.2, 0.63, 1.58)
# Cells (work × slack) of a table.
_CELLS = 4000
_SHORTEST_STEP_HOURS = 0.1
# Decisions of a cell: modes IDLE, ON_DEMAND and SPOT with capacity, IDLE and ON_DEMAND without, by age.
_CHOICES = 5 * len(AGES)
LATE = 1e6

REASONS = (
    "spot has capacity and is the cheapest way to the deadline",
    "no capacity: waiting is cheaper than on-demand, and the deadline allows it",
    "on-demand: waiting for spot would cost more than it saves",
    "on-demand: the deadline allows no more risk",
    "spot has capacity, but has not proved itself for long enough to pay its launch",
)


class Arithmetic(NamedTuple):
    """Operations of floats; the simulation passes those of arrays."""

    where: Callable[[Number, Number, Number], Number]
    whole: Callable[[Number], Number]
    pick: Callable[[Callable[[int], bytes], Number, Number], Number]


FLOATS = Arithmetic(
    lambda condition, yes, no: yes if condition else no, int, lambda tables, which, index: tables(which)[index]
)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Fixed terms of a run.

    Attributes:
        work_hours, deadline_hours: at the start.
        price_ratio: on-demand price over spot price.
        restart_hours: mean hours from a launch to the first new step.
        restart_bound_hours: hours that a launch never exceeds, for the guard.
        lost_bound_hours: work that an interruption can lose: the checkpoint interval.
    """

    work_hours: float
    deadline_hours: float
    price_ratio: float
    restart_hours: float
    restart_bound_hours: float
    lost_bound_hours: float = 0.0


@dataclass(kw_only=True)
class Pool:
    """Record of a pool: its state, the age of that state, and its events beside those that the curve expects.

    Attributes:
        reclaim_factor: prior factor of the hazard of losing capacity (``band_factor``).
    """

    available: Number
    age_hours: Number = FIRST_AGE_HOURS
    losses: Number = 0.0
    expected_losses: Number = 0.0
    returns: Number = 0.0
    expected_returns: Number = 0.0
    reclaim_factor: float = 1.0

    def observe(self, available: Number, hours: float, arithmetic: Arithmetic = FLOATS) -> None:
        """Take in the availability now, ``hours`` after the last."""
        where = arithmetic.where
        expected = HAZARD[0] * hours / (self.age_hours + hours / 2 + HAZARD[1])
        changed = available != self.available
        self.expected_losses = self.expected_losses + where(self.available, expected, 0.0)
        self.expected_returns = self.expected_returns + where(self.available, 0.0, expected)
        self.losses = self.losses + where(self.available, changed, False)
        self.returns = self.returns + where(self.available, False, changed)
        self.age_hours = where(changed, 0.0, self.age_hours + hours)
        self.available = available

    @property
    def loss_factor(self) -> Number:
        """Estimated hazard of losing capacity over the curve's."""
        return self.reclaim_factor * learned_factor(self.losses, self.reclaim_factor * self.expected_losses)

    @property
    def return_factor(self) -> Number:
        """Estimated hazard of capacity's return over the curve's."""
        return learned_factor(self.returns, self.expected_returns)


def learned_factor(events: Number, expected: Number) -> Number:
    """Estimate a rate over its prior, which weighs LEARNED_FROM events, from the events seen and those it expects."""
    return (LEARNED_FROM + events) / (LEARNED_FROM + expected)


def band_factor(reclaims_per_hour: float) -> float:
    """Prior factor of a pool whose Spot Advisor band means so many reclaims an hour."""
    return reclaims_per_hour * (BAND_AGE_HOURS + HAZARD[1]) / HAZARD[0]


class Decision(NamedTuple):
    """The mode of the next tick, and the index of its reason in REASONS."""

    mode: Number
    reason: Number


def decide(
    terms: Terms,
    pool: Pool,
    *,
    mode: Number,
    loading: Number,
    work_hours: Number,
    left_hours: Number,
    tick_hours: float,
    arithmetic: Arithmetic = FLOATS,
) -> Decision:
    """Choose the mode until the next tick.

    Args:
        terms: the run's fixed terms.
        pool: the spot pool, observed up to now.
        mode: what runs now; a reclaimed spot node does not.
        loading: the running nodes do not work yet.
        work_hours: work left, counted from the last checkpoint where nothing runs.
        left_hours: time to the deadline.
        tick_hours: time until the next decision.
        arithmetic: operations of the numbers' kind.
    """
    where = arithmetic.where
    slack = left_hours - work_hours
    bound, lost = terms.restart_bound_hours, terms.lost_bound_hours
    may_idle = slack - tick_hours >= bound
    may_launch = may_idle & (slack >= bound + terms.restart_hours + lost)
    may_stay = where(loading, may_idle, slack >= bound + lost)
    spot_allowed = where(mode == SPOT, may_stay, may_launch) & pool.available

    # A launch under way is still work to do.
    pending = where(loading, terms.restart_hours / 2, 0.0)
    wanted = look_up(
        terms,
        available=pool.available,
        mode=mode,
        work_hours=work_hours,
        slack_hours=slack - pending,
        age_hours=pool.age_hours,
        loss_factor=pool.loss_factor,
        return_factor=pool.return_factor,
        arithmetic=arithmetic,
    )

    choice = where(wanted == SPOT, where(spot_allowed, SPOT, where(may_idle, IDLE, ON_DEMAND)), wanted)
    # Spot nodes that work and are safe stay: only rounding makes the table want on-demand there.
    working_spot = (mode == SPOT) & spot_allowed & where(loading, False, True)
    choice = where(working_spot, SPOT, choice)
    choice = where((choice == IDLE) & (may_idle == 0), ON_DEMAND, choice)
    forced = (choice == ON_DEMAND) & (may_idle == 0) & (spot_allowed == 0)
    unproved = pool.available & (choice != SPOT) & (forced == 0)
    reason = where(choice == SPOT, 0, where(forced, 3, where(unproved, 4, where(choice == IDLE, 1, 2))))
    return Decision(choice, reason)


def look_up(
    terms: Terms,
    *,
    available: Number,
    mode: Number,
    work_hours: Number,
    slack_hours: Number,
    age_hours: Number,
    loss_factor: Number = 1.0,
    return_factor: Number = 1.0,
    arithmetic: Arithmetic = FLOATS,
) -> Number:
    """Return the table's choice of the next mode, which no guard has seen; the factors are over the curve's rates."""
    where, whole, pick = arithmetic
    step = step_hours(terms)
    # Slack is rounded down and work up, against the policy.
    slack_cell = _clipped(whole(slack_hours / step), slack_cells(terms), arithmetic)
    work_cell = _clipped(whole(work_hours / step + 1 - 1e-9), work_cells(terms), arithmetic)
    age_bin = sum(whole(age_hours >= edge) for edge in AGES[1:])
    situation = where(available, mode, where(mode == ON_DEMAND, 4, 3))
    index = ((work_cell * (slack_cells(terms) + 1) + slack_cell) * len(AGES) + age_bin) * 5 + situation
    losses = sum(whole(loss_factor > bound) for bound in _BOUNDS)
    returns = sum(whole(return_factor > bound) for bound in _BOUNDS)
    return pick(lambda which: table(terms, which), losses * len(_FACTORS) + returns, index)


def _clipped(cell: Number, last: int, arithmetic: Arithmetic) -> Number:
    cell = arithmetic.where(cell < 0, 0, cell)
    return arithmetic.where(cell > last, last, cell)


def step_hours(terms: Terms) -> float:
    """Return the length of a step of the table: the work and the slack of a cell."""
    slack = terms.deadline_hours - terms.work_hours
    return max(math.sqrt(terms.work_hours * slack / _CELLS), _SHORTEST_STEP_HOURS)


def slack_cells(terms: Terms) -> int:
    """Return the last cell of slack."""
    return math.ceil((terms.deadline_hours - terms.work_hours) / step_hours(terms))


def work_cells(terms: Terms) -> int:
    """Return the last cell of work."""
    return math.ceil(terms.work_hours / step_hours(terms))


@lru_cache(maxsize=64)
def table(terms: Terms, which: int) -> bytes:
    """Decisions by work left, slack left, age and situation: backward induction on the expected cost.

    ``which`` is the pair of factors. Costs are hours of on-demand. A launch takes its mean restart at once; a step is
    ``step_hours`` long. It takes some tenths of a second, once a pair.
    """
    step, spot_price, restart = step_hours(terms), 1 / terms.price_ratio, terms.restart_hours
    bound, lost = terms.restart_bound_hours, terms.lost_bound_hours
    loses = chances(_FACTORS[which // len(_FACTORS)], step)
    comes = chances(_FACTORS[which % len(_FACTORS)], step)
    ages = range(len(AGES))
    older = [min(age + 1, len(AGES) - 1) for age in ages]
    grows = [min(step / (end - start), 1.0) for start, end in pairwise(AGES)] + [0.0]
    whole_cells, part = divmod(restart / step, 1.0)
    launch_cells = int(whole_cells)
    # An interruption's mean loss of work, and the price of doing it again.
    redo = lost / 2
    slacks = range(slack_cells(terms) + 1)
    finished = [[0.0] * 5 for _ in ages]
    before: list[list[list[float]]] = [finished for _ in slacks]
    decisions = bytearray(b"\0" * ((slack_cells(terms) + 1) * _CHOICES))
    for _ in range(work_cells(terms)):
        values: list[list[list[float]]] = []
        runs: list[list[tuple[float, float, float]]] = []
        for cell in slacks:
            slack = cell * step
            after = before[cell]
            waits = values[cell - 1] if cell else None
            may_idle = waits is not None and slack - step >= bound
            may_launch = slack >= bound + restart + lost
            may_stay = slack >= bound + lost
            # Cost to go of a step of work on on-demand and spot with capacity, and on on-demand without.
            run: list[tuple[float, float, float]] = []
            here: list[list[float]] = []
            for age in ages:
                grow, next_age, loss, come = grows[age], older[age], loses[age], comes[age]
                same, old, went, came = after[age], after[next_age], after[0], after[0]
                keep = 1 - loss
                od_up = step + keep * (same[1] + grow * (old[1] - same[1])) + loss * went[4]
                spot_up = step * spot_price + keep * (same[2] + grow * (old[2] - same[2])) + loss * (went[3] + redo)
                od_down = step + (1 - come) * (same[4] + grow * (old[4] - same[4])) + come * came[1]
                run.append((od_up, spot_up, od_down))
            runs.append(run)
            near, far = cell - launch_cells, cell - launch_cells - 1
            for age in ages:
                od_up, spot_up, od_down = run[age]
                if far >= 0:
                    near_run, far_run = runs[near][age], runs[far][age]
                    od_up_new, spot_up_new, od_down_new = (
                        one + part * (other - one) for one, other in zip(near_run, far_run, strict=True)
                    )
                else:
                    od_up_new, spot_up_new, od_down_new = od_up, LATE, od_down
                od_up_new, od_down_new = od_up_new + restart, od_down_new + restart
                spot_up_new = spot_up_new + restart * spot_price if may_launch else LATE
                if may_idle:
                    assert waits is not None
                    grow, next_age = grows[age], older[age]
                    same, old = waits[age], waits[next_age]
                    idle_up = (1 - loses[age]) * (same[0] + grow * (old[0] - same[0])) + loses[age] * waits[0][3]
                    idle_down = (1 - comes[age]) * (same[3] + grow * (old[3] - same[3])) + comes[age] * waits[0][0]
                else:
                    idle_up = idle_down = LATE
                spot_kept = spot_up if may_stay else LATE
                options = (
                    (idle_up, od_up_new, spot_up_new),
                    (idle_up, od_up, spot_up_new),
                    (idle_up, od_up_new, spot_kept),
                    (idle_down, od_down_new),
                    (idle_down, od_down),
                )
                best = [min(option) for option in options]
                here.append(best)
                decisions += bytes([option.index(value) for option, value in zip(options, best, strict=True)])
            values.append(here)
        before = values
    return bytes(decisions)


def chances(factor: float, step: float) -> Sequence[float]:
    """Chance of a change within a step, by age bin: the curve's mean over the bin."""
    scale, offset = HAZARD
    chances = []
    for start, end in zip(AGES, (*AGES[1:], 3 * AGES[-1]), strict=True):
        rate = factor * scale * math.log((end + offset) / (start + offset)) / (end - start)
        chances.append(1 - math.exp(-rate * step))
    return chances
