"""The policies, each by its name.

Greedy and Uniform Progress follow "Can't Be Late" (sections 3 and 5.2 of
https://www.usenix.org/conference/nsdi24/presentation/wu-zhanghao) and the simulator of its authors: times are rounded
to ticks against the policy, and its margin for a restart is the mean one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from optimizer.economics.simulation.engine import IDLE, ON_DEMAND, SPOT, Policy, View
from optimizer.performance.types import Bools, Ints


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
}
