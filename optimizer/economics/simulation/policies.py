"""The policies, each by its name; adaptive is ``bootstrap.contract.pool_policy``, as the controller runs it.

Greedy and Uniform Progress follow "Can't Be Late" (sections 3 and 5.2 of
https://www.usenix.org/conference/nsdi24/presentation/wu-zhanghao), with the guard of ``pool_policy`` for the deadline.
Both were published for a pool whose capacity is known: they take several pools in turn.
"""

from __future__ import annotations

from bootstrap.contract.pool_policy import Adaptive, Mode, has_no_time, must_buy
from bootstrap.contract.pools import PoolEvent, PoolRecord, reclaimed, refused
from optimizer.economics.interruption import FALLBACK_AFTER_HOURS
from optimizer.economics.simulation.simulator import NewPolicy, PoolsView, SimulatedJob


class SpotOnly:
    """Spot from the first pool that has it, whatever the deadline; pools in turn, from the one that answered last."""

    def __init__(self, pools: int) -> None:
        self._pools, self._next = pools, 0
        self._tried: set[int] = set()
        self._asked_hours = -1.0

    def keep(self, view: PoolsView) -> Mode:
        """Return what runs."""
        return view.mode

    def next_try(self, view: PoolsView) -> int | None:
        """Return the next pool in turn while nothing runs."""
        return self._turn(view) if self.keep(view) is Mode.IDLE else None

    def _turn(self, view: PoolsView) -> int | None:
        if view.elapsed_hours != self._asked_hours:
            self._asked_hours, self._tried = view.elapsed_hours, set()
        return None if self._next in self._tried else self._next

    def note(self, event: PoolEvent, pool: int, hours: float) -> None:
        """Go on to the next pool after a refusal; after a reclaim the same pool is tried first."""
        if event is refused:
            self._tried.add(pool)
            self._next = (pool + 1) % self._pools


class OnDemand(SpotOnly):
    """On-demand from start to end."""

    def keep(self, view: PoolsView) -> Mode:
        """Return on-demand."""
        return Mode.ON_DEMAND


class Greedy(SpotOnly):
    """Spot from the first pool that has it, until the deadline allows no more waiting; then on-demand to the end."""

    def keep(self, view: PoolsView) -> Mode:
        """Return what runs, or on-demand where the deadline demands it."""
        return Mode.ON_DEMAND if must_buy(view) else view.mode

    def next_try(self, view: PoolsView) -> int | None:
        """Return the next pool in turn while nothing runs and time is left."""
        return None if has_no_time(view) else super().next_try(view)


class Fallback(SpotOnly):
    """The stack's default policy: on-demand to the end once spot has not come for a gang window."""

    def __init__(self, pools: int) -> None:
        super().__init__(pools)
        self._lost_hours = 0.0

    def keep(self, view: PoolsView) -> Mode:
        """Return what runs, or on-demand after the window."""
        waited = view.mode is Mode.IDLE and view.elapsed_hours - self._lost_hours >= FALLBACK_AFTER_HOURS
        return Mode.ON_DEMAND if waited else view.mode

    def note(self, event: PoolEvent, pool: int, hours: float) -> None:
        """Begin a window at a reclaim."""
        super().note(event, pool, hours)
        if event is reclaimed:
            self._lost_hours = hours


class UniformProgress(SpotOnly):
    """Progress in proportion to time: on-demand where the run is behind, spot from any pool whenever it comes."""

    def __init__(self, pools: int, job: SimulatedJob) -> None:
        super().__init__(pools)
        self._job = job

    def keep(self, view: PoolsView) -> Mode:
        """Return on-demand where the run is behind."""
        if must_buy(view):
            return Mode.ON_DEMAND
        if view.mode is Mode.IDLE and self._lead(view) < 0:
            return Mode.ON_DEMAND
        return view.mode

    def next_try(self, view: PoolsView) -> int | None:
        """Return the next pool in turn while nothing runs, or on-demand nodes that are two restarts ahead."""
        if view.mode is Mode.SPOT or has_no_time(view):
            return None
        if view.mode is Mode.ON_DEMAND and self._lead(view) <= 2 * self._job.restart_hours:
            return None
        return self._turn(view)

    def _lead(self, view: PoolsView) -> float:
        """Hours by which the work done is ahead of the pace."""
        job = self._job
        return (job.work_hours - view.work_hours) * job.deadline_hours / job.work_hours - view.elapsed_hours


POLICIES: dict[str, NewPolicy] = {
    "on_demand": lambda pools, job: OnDemand(pools),
    "spot_only": lambda pools, job: SpotOnly(pools),
    "greedy": lambda pools, job: Greedy(pools),
    "fallback": lambda pools, job: Fallback(pools),
    "uniform_progress": UniformProgress,
    "adaptive": lambda pools, job: Adaptive(dict.fromkeys(range(pools), PoolRecord())),
}
