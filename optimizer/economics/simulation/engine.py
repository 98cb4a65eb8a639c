"""The engine for one pool: it plays a policy in all runs at once, tick by tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bootstrap.contract.adaptive import IDLE, ON_DEMAND, SPOT
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.traces import Windows
from optimizer.performance.types import Bools, Floats, Ints

# Launches of a run that draw a delay of their own; later ones use the draws again.
DRAWS = 64
DONE_HOURS = 1e-9


@dataclass(kw_only=True, slots=True)
class View:
    """State of all runs at the start of a tick, as a policy sees it: an element a run, or a number that all share.

    Attributes:
        gap_hours: length of a tick.
        elapsed_hours, left_hours: since the start, and until the deadline.
        work_hours: work that is left.
        mode: what runs now (IDLE, ON_DEMAND, SPOT); a spot node that was reclaimed runs no more.
        loading_hours: restart time left until the running nodes work.
        available: spot capacity can be had, or kept, in this tick.
        interrupted: spot nodes were reclaimed at the start of this tick.
    """

    job: Job
    gap_hours: float
    elapsed_hours: float
    left_hours: float
    work_hours: Floats
    mode: Ints
    loading_hours: Floats
    available: Bools
    interrupted: Bools


class Policy(Protocol):
    """Decides for all runs at once; made anew for each simulation, so that it can keep what it learns."""

    def decide(self, view: View) -> Ints:
        """Return the mode of each run in this tick. SPOT without capacity is IDLE; a run that is done has no nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Simulated runs, one an element.

    Attributes:
        cost: hours of on-demand that would cost as much.
        late: the work was not done at the deadline, where the simulation ends.
    """

    cost: Floats
    late: Bools
    spot_hours: Floats
    on_demand_hours: Floats
    interruptions: Floats


def simulate(windows: Windows, job: Job, policy: Policy, *, seed: int) -> Runs:
    """Play ``policy`` in every window.

    All policies meet the same delays: a run's n-th launch and n-th interruption draw the same hours.
    """
    gap_hours = windows.gap_s / 3600
    count, ticks = windows.available.shape
    random = np.random.default_rng(seed)
    restarts = job.draw_restarts(random, (count, DRAWS))
    losses = job.draw_lost(random, (count, DRAWS)) if job.checkpoint_hours else None
    rows = np.arange(count)
    mode = np.full(count, IDLE)
    work = np.full(count, job.work_hours)
    loading = np.zeros(count)
    fresh = np.zeros(count)  # work since the last launch: an interruption cannot lose more
    spot_hours, on_demand_hours = np.zeros(count), np.zeros(count)
    launches, interruptions = np.zeros(count, dtype=int), np.zeros(count, dtype=int)
    available_by_tick = np.ascontiguousarray(windows.available.T)
    for tick in range(ticks):
        elapsed = tick * gap_hours
        step = min(gap_hours, job.deadline_hours - elapsed)
        available = available_by_tick[tick]
        interrupted = (mode == SPOT) & ~available & (work > DONE_HOURS)
        if interrupted.any():
            if losses is not None:
                lost = np.where(interrupted, np.minimum(losses[rows, interruptions % DRAWS], fresh), 0.0)
                work += lost
            interruptions += interrupted
            mode = np.where(interrupted, IDLE, mode)
        running = work > DONE_HOURS
        if not running.any():
            break
        wanted = policy.decide(
            View(
                job=job,
                gap_hours=gap_hours,
                elapsed_hours=elapsed,
                left_hours=job.deadline_hours - elapsed,
                work_hours=work,
                mode=mode,
                loading_hours=loading,
                available=available,
                interrupted=interrupted,
            )
        )
        wanted = np.where(running & ~((wanted == SPOT) & ~available), wanted, IDLE)
        launched = (wanted != mode) & (wanted != IDLE)
        if launched.any():
            loading = np.where(launched, restarts[rows, launches % DRAWS], loading)
            fresh = np.where(launched, 0.0, fresh)
            launches += launched
        mode = wanted
        hours = np.where(mode == IDLE, 0.0, np.minimum(step, loading + work))
        loaded = np.minimum(loading, hours)
        worked = hours - loaded
        loading = loading - loaded
        work = work - worked
        fresh = fresh + worked
        spot_hours += np.where(mode == SPOT, hours, 0.0)
        on_demand_hours += np.where(mode == ON_DEMAND, hours, 0.0)
    return Runs(
        cost=on_demand_hours + spot_hours / job.price_ratio,
        late=work > DONE_HOURS,
        spot_hours=spot_hours,
        on_demand_hours=on_demand_hours,
        interruptions=interruptions.astype(float),
    )
