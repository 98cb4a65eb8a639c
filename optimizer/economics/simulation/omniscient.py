"""Lower bound of every policy's cost: dynamic programming with the whole window known.

Find the cheapest sequence of modes whose work reaches the job's. A price on an hour of work (a Lagrange multiplier)
replaces that condition: dynamic programming over the stretches of equal availability then maximises worth of work minus
cost, and the best price makes the bound tight up to the duality gap, which is below one on-demand launch
(https://en.wikipedia.org/wiki/Lagrangian_relaxation). The mixture of the two sequences that the best price makes equal
has exactly the work and the bound's cost; its hours and interruptions are what the bound reports.

Every launch takes the mean restart and no work is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.economics.simulation.engine import IDLE, ON_DEMAND, SPOT, Runs
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.traces import Windows
from optimizer.performance.types import Bools, Floats

# At this price of an hour of work (on-demand costs 1) the sequence with the most work wins.
_ANY_PRICE = 1e6
_MAX_STEPS = 60
_TOLERANCE = 1e-9


class _Sequences(NamedTuple):
    """Sequences of modes, one a run."""

    spot_hours: Floats
    on_demand_hours: Floats
    launches: Floats
    reclaims: Floats

    def cost(self, job: Job) -> Floats:
        return self.on_demand_hours + self.spot_hours / job.price_ratio

    def work_hours(self, job: Job) -> Floats:
        return self.on_demand_hours + self.spot_hours - self.launches * job.restart_hours


def lower_bound(windows: Windows, job: Job) -> Runs:
    """Cost that no policy can go below, with the hours and interruptions of the sequences that make it."""
    lengths, available = _stretches(windows, job.deadline_hours)
    count = len(windows.available)
    too_little = _Sequences(*(np.zeros(count) for _ in range(4)))
    enough = _best_sequences(lengths, available, job, np.full(count, _ANY_PRICE))
    for _ in range(_MAX_STEPS):
        # The price at which both are worth the same; where no sequence is worth more, it is the best price.
        gained = enough.work_hours(job) - too_little.work_hours(job)
        price = (enough.cost(job) - too_little.cost(job)) / np.maximum(gained, _TOLERANCE)
        middle = _best_sequences(lengths, available, job, price)
        worth = price * middle.work_hours(job) - middle.cost(job)
        better = worth > price * enough.work_hours(job) - enough.cost(job) + _TOLERANCE
        if not better.any():
            break
        reaches = middle.work_hours(job) >= job.work_hours
        enough = _chosen(better & reaches, middle, enough)
        too_little = _chosen(better & ~reaches, middle, too_little)
    gained = enough.work_hours(job) - too_little.work_hours(job)
    part = (job.work_hours - too_little.work_hours(job)) / np.maximum(gained, _TOLERANCE)
    mixture = _Sequences(*(part * high + (1 - part) * low for high, low in zip(enough, too_little, strict=True)))
    return Runs(
        cost=mixture.cost(job),
        late=np.zeros(count, dtype=bool),
        spot_hours=mixture.spot_hours,
        on_demand_hours=mixture.on_demand_hours,
        interruptions=mixture.reclaims,
    )


def _chosen(mask: Bools, yes: _Sequences, no: _Sequences) -> _Sequences:
    return _Sequences(*(np.where(mask, one, other) for one, other in zip(yes, no, strict=True)))


def _stretches(windows: Windows, hours: float) -> tuple[Floats, Bools]:
    """Lengths, h, and availability of the runs' stretches; shape (stretches, runs), shorter runs filled with 0 h."""
    available = windows.available
    count, ticks = available.shape
    gap_hours = windows.gap_s / 3600
    changes = np.diff(available, axis=1, prepend=~available[:, :1])
    which = np.cumsum(changes, axis=1) - 1
    rows = np.arange(count)[:, None]
    lengths = np.zeros((count, which[:, -1].max() + 1))
    tick_hours = np.full(ticks, gap_hours)
    tick_hours[-1] = hours - (ticks - 1) * gap_hours
    np.add.at(lengths, (np.broadcast_to(rows, which.shape), which), np.broadcast_to(tick_hours, which.shape))
    kinds = available[:, :1] ^ (np.arange(lengths.shape[1])[None, :] % 2 == 1)
    return np.ascontiguousarray(lengths.T), np.ascontiguousarray(kinds.T)


def _best_sequences(lengths: Floats, available: Bools, job: Job, price: Floats) -> _Sequences:
    """For each run, the modes of the stretches that maximise price times work minus cost."""
    count = lengths.shape[1]
    # Rows are modes; columns are worth, spot hours, on-demand hours, launches, reclaims.
    state = np.zeros((3, 5, count))
    state[[ON_DEMAND, SPOT], 0] = -np.inf
    launch = price * job.restart_hours
    columns = np.arange(count)
    for hours, has_spot in zip(lengths, available, strict=True):
        best = state[:, 0].argmax(axis=0)
        from_best = state[best, :, columns].T
        after = np.empty_like(state)
        after[IDLE] = from_best
        # A spot node that a stretch without capacity ends is reclaimed, wherever the run goes from there.
        for mode, rate in ((ON_DEMAND, 1.0), (SPOT, 1 / job.price_ratio)):
            starts = from_best[0] - launch > state[mode, 0]
            here = np.where(starts, from_best, state[mode])
            here[0] += np.where(starts, -launch, 0.0) + (price - rate) * hours
            here[1 if mode == SPOT else 2] += hours
            here[3] += starts
            after[mode] = here
        after[SPOT, 0] = np.where(has_spot, after[SPOT, 0], -np.inf)
        came_from_spot = (best == SPOT) & ~has_spot
        after[IDLE, 4] += came_from_spot
        state = after
    best = state[:, 0].argmax(axis=0)
    _, *totals = state[best, :, columns].T
    return _Sequences(*totals)
