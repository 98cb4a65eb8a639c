"""The adaptive spot policy: which pool to ask, and when to buy on demand. Pure; one pool is the case n = 1.

The simulation makes an ``Adaptive`` for each run and reports every event; the controller makes one in each tick, from
the records in its state. ``pools.py`` orders the pools, ``spot_values.py`` weighs spot against on-demand; the guard
here keeps the deadline, whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic

from bootstrap.contract.pools import YOUNG_S, Pool, PoolEvent, PoolRecord, Prospect, age_since_s, rank_pools
from bootstrap.contract.spot_values import Delays, Terms, should_wait, spot_saving
from bootstrap.contract.timings import HOUR, TICK

# A refused launch takes two ticks: the first sees the refusal, the second asks elsewhere.
TRY_HOURS = 2 * TICK / HOUR
# Rates of return are rounded to powers of this, and prices to this many digits, so that few tables serve a run.
_FACTOR_STEP = 2.5
_PRICE_DIGITS = 2


class Mode(Enum):
    """Kind of the running nodes."""

    IDLE = "idle"
    ON_DEMAND = "on-demand"
    SPOT = "spot"


@dataclass(kw_only=True, slots=True)
class RunView(Generic[Pool]):
    """State of one run, as its policy sees it.

    Attributes:
        now_s: on the records' clock.
        elapsed_hours, left_hours: since the start, and until the deadline.
        step_hours: until the next tick, when the policy is asked again.
        work_hours, whole_hours: work that is left, and of the whole run.
        prices: an hour of spot in each pool in this tick; on-demand's is 1.
        pool: the pool of the running spot nodes, where some run.
        loading_hours: restart time left until the running nodes work.
    """

    delays: Delays
    now_s: float
    elapsed_hours: float
    left_hours: float
    step_hours: float
    work_hours: float
    whole_hours: float
    prices: Mapping[Pool, float]
    mode: Mode
    pool: Pool | None
    loading_hours: float


def has_no_time(view: RunView[Pool]) -> bool:
    """Return whether the next tick has no time for the work and a launch: then only on-demand may be launched."""
    return view.left_hours - view.step_hours < view.work_hours + view.delays.restart_bound_hours


def may_launch(view: RunView[Pool]) -> bool:
    """Return whether spot nodes that come now can load before the guard would buy on demand in their place."""
    delays = view.delays
    needed_hours = view.work_hours + delays.lost_bound_hours + delays.restart_bound_hours
    return view.left_hours - view.step_hours - delays.restart_hours >= needed_hours


def must_buy(view: RunView[Pool]) -> bool:
    """Return whether the run needs on-demand now; spot stays while its loss at the next tick leaves time to launch."""
    if view.mode is not Mode.SPOT:
        return has_no_time(view)
    worked = max(0.0, view.step_hours - view.loading_hours)
    if view.work_hours <= worked:
        return False
    # A reclaim also loses the work since the last checkpoint.
    needed_hours = view.work_hours - worked + view.delays.lost_bound_hours + view.delays.restart_bound_hours
    return view.left_hours - view.step_hours < needed_hours


class Adaptive(Generic[Pool]):
    """Spot in the best pool; on-demand where waiting costs more, or the deadline demands it.

    Args:
        records: what the run knows of each pool; ties keep this order.
    """

    def __init__(self, records: Mapping[Pool, PoolRecord]) -> None:
        self._records = dict(records)
        self._order: list[Pool] = []
        self._asked_hours = -1.0

    def keep(self, view: RunView[Pool]) -> Mode:
        """Return what runs, or on-demand where spot will not do."""
        if must_buy(view) or (view.mode is Mode.IDLE and not self._should_wait(view)):
            return Mode.ON_DEMAND
        return view.mode

    def next_try(self, view: RunView[Pool]) -> Pool | None:
        """Return the best pool that has not refused in this tick and is worth more than what runs."""
        if has_no_time(view):
            return None
        if view.elapsed_hours != self._asked_hours:
            self._asked_hours = view.elapsed_hours
            self._order = [prospect.name for prospect in reversed(self.worth(view))]
        return self._order.pop() if self._order else None

    def note(self, event: PoolEvent, pool: Pool, hours: float) -> None:
        """Record what happened to a launch or to running nodes, ``hours`` after the start."""
        self._records[pool] = event(self._records[pool], hours * 3600)

    def rank(self, view: RunView[Pool]) -> list[Prospect[Pool]]:
        """Return the pools whose hour is worth more than the running nodes' hour, best first."""
        running_price = None
        if view.mode is Mode.ON_DEMAND:
            running_price = 1.0
        elif view.mode is Mode.SPOT and view.pool is not None:
            running_price = view.prices[view.pool]
        return rank_pools(
            self._records,
            view.now_s,
            prices=view.prices,
            running_price=running_price,
            restart_s=view.delays.restart_hours * 3600,
            try_s=TRY_HOURS * 3600,
        )

    def worth(self, view: RunView[Pool]) -> list[Prospect[Pool]]:
        """Return the pools of ``rank`` that are worth asking now; leaving on-demand nodes spends slack on a restart."""
        ranked = self.rank(view)
        if view.mode is not Mode.ON_DEMAND or not ranked:
            return ranked
        terms, worth = self._terms(view, ranked), []
        for prospect in ranked:
            refused_s = self._records[prospect.name].empty_at_s
            since_s = math.inf if refused_s is None else view.now_s - refused_s
            saving = spot_saving(
                terms,
                work_hours=view.work_hours,
                slack_hours=view.left_hours - view.work_hours,
                age_hours=age_since_s(since_s) / 3600,
            )
            if saving > 0:
                worth.append(prospect)
        return worth

    def may_leave(self, view: RunView[Pool]) -> bool:
        """Return whether the running nodes work, and a pool is worth asking that the deadline allows."""
        return view.loading_hours <= 0 and may_launch(view) and bool(self.worth(view))

    def _should_wait(self, view: RunView[Pool]) -> bool:
        ranked = self.rank(view)
        droughts = self._droughts_s(view, ranked)
        # A pool that has not refused is asked first; without one that is worth its restart nothing is waited for.
        if len(droughts) < len(ranked) or not ranked:
            return bool(ranked)
        return should_wait(
            self._terms(view, ranked),
            work_hours=view.work_hours,
            slack_hours=view.left_hours - view.work_hours,
            drought_hours=min(droughts) / 3600,
        )

    def _droughts_s(self, view: RunView[Pool], ranked: list[Prospect[Pool]]) -> list[float]:
        """Return how long each of these pools has been empty; pools that have not refused are left out."""
        since = [self._records[prospect.name].empty_since_s for prospect in ranked]
        return [view.now_s - since_s for since_s in since if since_s is not None]

    def _terms(self, view: RunView[Pool], ranked: list[Prospect[Pool]]) -> Terms:
        """Return the terms for the run's values. All pools count as one, which is back when any pool is."""
        droughts = self._droughts_s(view, ranked)
        youngest_s, delays = min(droughts, default=0.0), view.delays
        # Rates add; each is 1 / (age + YOUNG_S).
        factor = sum((YOUNG_S + youngest_s) / (YOUNG_S + drought_s) for drought_s in droughts) or 1.0
        deadline_hours = view.elapsed_hours + view.left_hours
        return Terms(
            work_hours=round(view.whole_hours, 3),
            # Work may be done faster than planned.
            deadline_hours=round(max(deadline_hours, view.whole_hours + delays.restart_bound_hours), 3),
            spot_price=round(min(view.prices[name] for name in self._records), _PRICE_DIGITS),
            delays=delays,
            return_factor=_FACTOR_STEP ** round(math.log(factor, _FACTOR_STEP)),
        )
