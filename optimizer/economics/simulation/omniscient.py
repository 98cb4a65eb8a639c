"""Lower bound of every policy's cost: dynamic programming with the whole window known.

Find the cheapest sequence of modes whose work reaches the job's. A price on an hour of work (a Lagrange multiplier)
replaces that condition: dynamic programming over the stretches of equal availability then maximises worth of work minus
cost, and the best price makes the bound tight up to the duality gap
(https://en.wikipedia.org/wiki/Lagrangian_relaxation). The mixture of the two sequences that the best price makes equal
has exactly the work and the bound's cost; its hours and interruptions are what the bound reports.

With several pools every pool is a mode of its own. Every launch takes the mean restart; no work is lost, no launch is
refused and no checkpoint has to move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimizer.economics.simulation.simulator import Runs, SimulatedJob
from optimizer.performance.types import Bools, Floats

# Rows of the modes; from _SPOT on a row a pool.
_IDLE, _ON_DEMAND, _SPOT = range(3)

# At this price of an hour of work (on-demand costs 1) the sequence with the most work wins.
_ANY_PRICE = 1e6
_MAX_STEPS = 60
_TOLERANCE = 1e-9


class _Sequences(NamedTuple):
    """Sequences of modes, one a run."""

    spot_hours: Floats
    on_demand_hours: Floats
    cost: Floats
    launches: Floats
    reclaims: Floats

    def work_hours(self, job: SimulatedJob) -> Floats:
        return self.on_demand_hours + self.spot_hours - self.launches * job.restart_hours


def lower_bound(available: Bools, gap_s: float, job: SimulatedJob, prices: Floats) -> Runs:
    """Cost that no policy can go below, with the hours and interruptions of the sequences that make it.

    ``available`` and ``prices`` are those of ``simulate``.
    """
    by_tick = np.broadcast_to(prices if prices.ndim == 3 else prices[:, :, None], available.shape)
    lengths, stretches, rates = _stretches(available, by_tick, gap_s / 3600, job.deadline_hours)
    count = len(available)
    too_little = _Sequences(*(np.zeros(count) for _ in _Sequences._fields))
    enough = _best_sequences(lengths, stretches, job, rates, np.full(count, _ANY_PRICE))
    for _ in range(_MAX_STEPS):
        # At this price both sequences are worth the same. It is the best price where no other sequence is worth more.
        gained = enough.work_hours(job) - too_little.work_hours(job)
        price = (enough.cost - too_little.cost) / np.maximum(gained, _TOLERANCE)
        middle = _best_sequences(lengths, stretches, job, rates, price)
        worth = price * middle.work_hours(job) - middle.cost
        better = worth > price * enough.work_hours(job) - enough.cost + _TOLERANCE
        if not better.any():
            break
        reaches = middle.work_hours(job) >= job.work_hours
        enough = _chosen(better & reaches, middle, enough)
        too_little = _chosen(better & ~reaches, middle, too_little)
    gained = enough.work_hours(job) - too_little.work_hours(job)
    part = (job.work_hours - too_little.work_hours(job)) / np.maximum(gained, _TOLERANCE)
    mixture = _Sequences(*(part * high + (1 - part) * low for high, low in zip(enough, too_little, strict=True)))
    return Runs(
        cost=mixture.cost,
        late=np.zeros(count, dtype=bool),
        spot_hours=mixture.spot_hours,
        on_demand_hours=mixture.on_demand_hours,
        interruptions=mixture.reclaims,
    )


def _chosen(mask: Bools, yes: _Sequences, no: _Sequences) -> _Sequences:
    return _Sequences(*(np.where(mask, *pair) for pair in zip(yes, no, strict=True)))


def _stretches(available: Bools, prices: Floats, gap_hours: float, hours: float) -> tuple[Floats, Bools, Floats]:
    """Lengths, h, availability and hourly rates of the runs' stretches, in which no pool changes.

    Shapes (stretches, runs), (stretches, pools, runs) and (stretches, 1 + pools, runs): the rates begin with on-demand.
    A run with fewer stretches has some of 0 h at its end.
    """
    count, _, ticks = available.shape
    changes = (np.diff(available, axis=2) | (np.diff(prices, axis=2) != 0)).any(axis=1)
    which = np.cumsum(np.concatenate([np.zeros((count, 1), dtype=bool), changes], axis=1), axis=1)
    rows = np.broadcast_to(np.arange(count)[:, None], which.shape)
    shape = which[:, -1].max() + 1, count
    lengths = np.zeros(shape)
    tick_hours = np.full(ticks, gap_hours)
    tick_hours[-1] = hours - (ticks - 1) * gap_hours
    np.add.at(lengths, (which, rows), np.broadcast_to(tick_hours, which.shape))
    # At the end nothing is taken back.
    pools = np.ones((*shape, available.shape[1]), dtype=bool)
    pools[which, rows] = available.transpose(0, 2, 1)
    rates = np.ones((*shape, 1 + available.shape[1]))
    rates[which, rows, 1:] = prices.transpose(0, 2, 1)
    return lengths, np.ascontiguousarray(pools.transpose(0, 2, 1)), np.ascontiguousarray(rates.transpose(0, 2, 1))


def _best_sequences(lengths: Floats, available: Bools, job: SimulatedJob, rates: Floats, price: Floats) -> _Sequences:
    """For each run, the modes of the stretches that maximise price times work minus cost.

    The modes are _IDLE, _ON_DEMAND, and from _SPOT on the pools; ``rates`` are hourly prices, from _ON_DEMAND on.
    """
    count = lengths.shape[1]
    # Columns are worth, spot hours, on-demand hours, cost, launches, reclaims.
    state = np.zeros((1 + rates.shape[1], 6, count))
    state[_ON_DEMAND:, 0] = -np.inf
    launch = price * job.restart_hours
    columns = np.arange(count)
    for hours, has_spot, usd in zip(lengths, available, rates, strict=True):
        best = state[:, 0].argmax(axis=0)
        from_best = state[best, :, columns].T
        # A pool that a stretch without capacity ends takes its nodes back, wherever the run goes from there.
        from_best[5] += (best >= _SPOT) & ~has_spot[np.maximum(best - _SPOT, 0), columns]
        starts = from_best[0] - launch > state[_ON_DEMAND:, 0]
        state[_ON_DEMAND:] = np.where(starts[:, None], from_best, state[_ON_DEMAND:])
        state[_IDLE] = from_best
        state[_ON_DEMAND:, 0] += (price - usd) * hours - starts * launch
        state[_ON_DEMAND, 2] += hours
        state[_SPOT:, 1] += hours
        state[_ON_DEMAND:, 3] += usd * hours
        state[_ON_DEMAND:, 4] += starts
        state[_SPOT:, 0][~has_spot] = -np.inf
    best = state[:, 0].argmax(axis=0)
    _, *totals = state[best, :, columns].T
    return _Sequences(*totals)
