"""The policies, each by its name.

Greedy and Uniform Progress follow "Can't Be Late" (sections 3 and 5.2 of
https://www.usenix.org/conference/nsdi24/presentation/wu-zhanghao) and the simulator of its authors: times are rounded
to ticks against the policy, and its margin for a restart is the mean one. The rule of ``adaptive`` is
``bootstrap.contract.adaptive``, which the controller can run as it is; here it gets arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bootstrap.contract.adaptive import FIRST_AGE_HOURS, IDLE, ON_DEMAND, SPOT, Arithmetic, Pool, Terms, decide
from optimizer.economics.simulation.engine import Policy, View
from optimizer.economics.simulation.job import Job
from optimizer.performance.types import Bools, Floats, Ints


class OnDemand:
    """On-demand from start to end."""

    def decide(self, view: View) -> Ints:
        """Return on-demand for every run."""
        return np.full(len(view.mode), ON_DEMAND)


class SpotOnly:
    """Spot whenever the pool has it, whatever the deadline."""

    def decide(self, view: View) -> Ints:
        """Return spot where it is available."""
        return np.where(view.available, SPOT, IDLE)


class Greedy:
    """Spot until the deadline allows no more waiting, then on-demand to the end."""

    def decide(self, view: View) -> Ints:
        """Return spot where it is available, and on-demand where the safety net demands it."""
        return _safety_net(view, np.where(view.available, SPOT, IDLE))


class UniformProgress:
    """Progress in proportion to time: on-demand where the run is behind, spot whenever it comes."""

    def decide(self, view: View) -> Ints:
        """Apply the rules of section 5.2.2: uniform progress, taking risks, hysteresis, safety net."""
        job = view.job
        done = job.work_hours - view.work_hours
        pace = job.work_hours / job.deadline_hours
        behind = done < view.elapsed_hours * pace
        wanted = np.where(view.available, SPOT, np.where(behind, ON_DEMAND, IDLE))
        ahead = done > (view.elapsed_hours + 2 * job.restart_hours) * pace
        stays = (view.mode == ON_DEMAND) & ~(view.available & ahead)
        return _safety_net(view, np.where(stays, ON_DEMAND, wanted))


class Adaptive:
    """Dynamic programming over what the pool has shown so far; it keeps every deadline that on-demand can keep."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def decide(self, view: View) -> Ints:
        """Return the decisions of the contract's rule."""
        if self._pool is None:
            self._pool = Pool(available=view.available, age_hours=np.full(len(view.mode), FIRST_AGE_HOURS))
        else:
            self._pool.observe(view.available, view.gap_hours, ARRAYS)
        modes: Ints = decide(
            terms(view.job),
            self._pool,
            mode=view.mode,
            loading=view.loading_hours > 0,
            work_hours=view.work_hours,
            left_hours=view.left_hours,
            tick_hours=view.gap_hours,
            arithmetic=ARRAYS,
        ).mode
        return modes


def terms(job: Job) -> Terms:
    """Terms of the adaptive rule for a job."""
    return Terms(
        work_hours=job.work_hours,
        deadline_hours=job.deadline_hours,
        price_ratio=job.price_ratio,
        restart_hours=job.restart_hours,
        restart_bound_hours=job.restart_bound_hours,
        lost_bound_hours=job.checkpoint_hours,
    )


def _whole(numbers: Floats | Bools) -> Ints:
    return np.asarray(numbers).astype(np.int64)


def _pick(tables: Callable[[int], bytes], which: Ints, index: Ints) -> Ints:
    picked = np.empty(index.shape, dtype=np.int64)
    for one in np.unique(which):
        rows = which == one
        picked[rows] = np.frombuffer(tables(int(one)), dtype=np.uint8)[index[rows]]
    return picked


ARRAYS = Arithmetic(np.where, _whole, _pick)


def _safety_net(view: View, wanted: Ints) -> Ints:
    """Go to on-demand where the time left is work and two restarts, or one for a running spot node that works."""
    gap, restart = view.gap_hours, view.job.restart_hours
    left_ticks = np.floor(view.left_hours / gap + 1e-9)

    def short(restarts: int) -> Bools:
        ticks: Bools = np.ceil((view.work_hours + restarts * restart) / gap - 1e-9) >= left_ticks
        return ticks

    working_spot = (view.mode == SPOT) & (view.loading_hours <= 0)
    wanted = np.where(short(2) & (view.mode != SPOT), ON_DEMAND, wanted)
    return np.where(short(1), np.where(working_spot, SPOT, ON_DEMAND), wanted)


POLICIES: dict[str, Callable[[], Policy]] = {
    "on_demand": OnDemand,
    "spot_only": SpotOnly,
    "greedy": Greedy,
    "uniform_progress": UniformProgress,
    "adaptive": Adaptive,
}
