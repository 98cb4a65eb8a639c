"""Policies over several pools, each by its name.

Greedy and Uniform Progress take the pools in turn: both were published for pools whose capacity is known.
"""

from __future__ import annotations

from collections.abc import Callable

from bootstrap.contract.pools import PoolRecord, came, expected_spot_s, left, rank_pools, reclaimed, refused
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.zones import Event, Mode, ZonePolicy, ZoneView


def _no_time(view: ZoneView) -> bool:
    """Until the next tick, the time left falls below work and one launch, so nothing but on-demand may be launched."""
    return view.left_hours - view.step_hours < view.work_hours + view.job.restart_bound_hours


def _must_buy(view: ZoneView) -> bool:
    """On-demand nodes are needed now; spot nodes stay while their loss at the next tick leaves time for a launch."""
    if view.mode is not Mode.SPOT:
        return _no_time(view)
    worked = max(0.0, view.step_hours - view.loading_hours)
    if view.work_hours <= worked:
        return False
    # A reclaim takes the work since the last checkpoint along.
    needed_hours = view.work_hours - worked + view.job.checkpoint_hours + view.job.restart_bound_hours
    return view.left_hours - view.step_hours < needed_hours


class OnDemand:
    """On-demand from start to end."""

    def keep(self, view: ZoneView) -> Mode:
        """Return on-demand."""
        return Mode.ON_DEMAND

    def next_try(self, view: ZoneView) -> int | None:
        """Return no pool."""
        return None

    def note(self, event: Event, pool: int, hours: float) -> None:
        """Learn nothing."""


class _InTurn:
    """The pools in turn, from the one that answered last."""

    def __init__(self, pools: int) -> None:
        self._pools, self._next = pools, 0
        self._tried: set[int] = set()
        self._asked_hours = -1.0

    def _turn(self, view: ZoneView) -> int | None:
        if view.elapsed_hours != self._asked_hours:
            self._asked_hours, self._tried = view.elapsed_hours, set()
        return None if self._next in self._tried else self._next

    def note(self, event: Event, pool: int, hours: float) -> None:
        """Go on to the next pool after a refusal; after a reclaim the same pool is tried first."""
        if event is Event.REFUSED:
            self._tried.add(pool)
            self._next = (pool + 1) % self._pools


class SpotOnly(_InTurn):
    """Spot from the first pool that has it, whatever the deadline."""

    def keep(self, view: ZoneView) -> Mode:
        """Return what runs."""
        return view.mode

    def next_try(self, view: ZoneView) -> int | None:
        """Return the next pool in turn while nothing runs."""
        return self._turn(view) if view.mode is Mode.IDLE else None


class Greedy(_InTurn):
    """Spot from the first pool that has it, until the deadline allows no more waiting; then on-demand to the end."""

    def keep(self, view: ZoneView) -> Mode:
        """Return what runs, or on-demand where the deadline demands it."""
        return Mode.ON_DEMAND if _must_buy(view) else view.mode

    def next_try(self, view: ZoneView) -> int | None:
        """Return the next pool in turn while nothing runs."""
        return self._turn(view) if view.mode is Mode.IDLE and not _no_time(view) else None


class UniformProgress(_InTurn):
    """Progress in proportion to time: on-demand where the run is behind, spot from any pool whenever it comes."""

    def keep(self, view: ZoneView) -> Mode:
        """Return on-demand where the run is behind."""
        if _must_buy(view):
            return Mode.ON_DEMAND
        if view.mode is Mode.IDLE and self._lead(view) < 0:
            return Mode.ON_DEMAND
        return view.mode

    def next_try(self, view: ZoneView) -> int | None:
        """Return the next pool in turn while nothing runs, or on-demand nodes that are two restarts ahead."""
        if view.mode is Mode.SPOT or _no_time(view):
            return None
        if view.mode is Mode.ON_DEMAND and self._lead(view) <= 2 * view.job.restart_hours:
            return None
        return self._turn(view)

    @staticmethod
    def _lead(view: ZoneView) -> float:
        """Hours by which the work done is ahead of the pace."""
        job = view.job
        return (job.work_hours - view.work_hours) * job.deadline_hours / job.work_hours - view.elapsed_hours


class Adaptive:
    """Ours, by ``bootstrap.contract.pools``.

    Spot in the best pool; on-demand where the spot to be expected does not do the work, or the deadline demands it.
    """

    def __init__(self, pools: int, job: Job, try_hours: float) -> None:
        self._pools = {str(place): PoolRecord() for place in range(pools)}
        self._restart_s, self._try_s = job.restart_hours * 3600, try_hours * 3600
        self._order: list[int] = []
        self._asked_hours = -1.0
        self._came_hours = self._spot_hours = 0.0

    def keep(self, view: ZoneView) -> Mode:
        """Return what runs, or on-demand where spot will not do."""
        if _must_buy(view):
            return Mode.ON_DEMAND
        if view.mode is Mode.IDLE and self._expected_hours(view) < view.work_hours + 2 * view.job.restart_bound_hours:
            return Mode.ON_DEMAND
        return view.mode

    def next_try(self, view: ZoneView) -> int | None:
        """Return the best pool that has not refused in this tick and is worth more than what runs."""
        if _no_time(view):
            return None
        if view.elapsed_hours != self._asked_hours:
            self._asked_hours = view.elapsed_hours
            ranked = rank_pools(
                self._pools,
                view.elapsed_hours * 3600,
                prices={str(place): price for place, price in enumerate(view.prices)},
                on_demand_price=1.0,
                running_price=self._running_price(view),
                restart_s=self._restart_s,
                try_s=self._try_s,
            )
            self._order = [int(prospect.name) for prospect in reversed(ranked)]
        return self._order.pop() if self._order else None

    def note(self, event: Event, pool: int, hours: float) -> None:
        """Record what happened to a launch or to running nodes."""
        self._pools[str(pool)] = _RECORDED[event](self._pools[str(pool)], hours * 3600)
        if event is Event.CAME:
            self._came_hours = hours
        elif event in (Event.RECLAIMED, Event.LEFT):
            self._spot_hours += hours - self._came_hours

    def _expected_hours(self, view: ZoneView) -> float:
        return (
            expected_spot_s(
                self._pools,
                view.elapsed_hours * 3600,
                left_s=view.left_hours * 3600,
                elapsed_s=view.elapsed_hours * 3600,
                spot_s=self._spot_hours * 3600,
            )
            / 3600
        )

    def _running_price(self, view: ZoneView) -> float | None:
        if view.mode is Mode.IDLE:
            return None
        return 1.0 if view.mode is Mode.ON_DEMAND else view.prices[view.pool]


_RECORDED = {Event.CAME: came, Event.REFUSED: refused, Event.RECLAIMED: reclaimed, Event.LEFT: left}

NewPolicy = Callable[[int, Job, float], ZonePolicy]
ZONE_POLICIES: dict[str, NewPolicy] = {
    "on_demand": lambda pools, job, try_hours: OnDemand(),
    "spot_only": lambda pools, job, try_hours: SpotOnly(pools),
    "greedy": lambda pools, job, try_hours: Greedy(pools),
    "uniform_progress": lambda pools, job, try_hours: UniformProgress(pools),
    "adaptive": Adaptive,
}
