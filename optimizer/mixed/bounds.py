"""The least that a mix of two groups of nodes can cost: what lets the search pass over nearly all of them, unweighed.

Notation, one pair of groups an element: x and y nodes; p and q USD per node-hour, the node's volumes included; v and w
samples a second of a node (``Physics.samples_per_second``); f USD per hour of the fleet; R the hours of a restart.

1. A step of G samples takes at least G / (v x + w y) of computation, every rank busy with its best micro-batch, and the
   communication c that any step of the two shows. So the training hours are at least
   T(x, y) = S / (v x + w y) + C, where S are hours of a machine that does one sample a second and C the steps' c.
2. ``outcome`` makes of T useful hours at least R + a T running hours with a = 1 / (1 - r R) and r the reclaims an hour
   of one node of each group, as stalls, lost work, waiting and further nodes only add; ``fleet_cost`` charges them all.
   So the expected cost is at least F(x, y) = (p x + q y + f) (R + a T(x, y)).
3. Of mixes of one speed v x + w y, T is one number, and F is linear: its least is at an end of the segment, where x or
   y is at its own least or most. So over all real x and y, F is least on the four edges of their box, and there it has
   a closed form: along y = const, with k = q y + f and u = w y, F(x) = (p x + k) (a S / (v x + u) + a C + R) rises in x
   where p u >= k v, and is convex otherwise, least where (v x + u)^2 = a S (k v - p u) / (p (a C + R)).
4. A deadline binds the 95th percentile of hours, which rises with T: it asks of v x + w y at least a speed, and cuts
   the edges short (the ends of the segments of 3 that it keeps stay on them).

Where the nodes are known, the bound is the cost itself, of T hours instead of the hours that they take (``find.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.outcome import lognormal_percentiles

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Pairs of groups to bound; arrays over pairs.

    Attributes:
        usd_per_hour: of a node of each group, pair x 2.
        speed: samples a second of a node of each group at most, pair x 2.
        most: nodes of each group at most, pair x 2.
        fleet_usd_per_hour: what the fleet pays beside its nodes.
        reclaims: an hour of one node of each group together.
        unit_hours: mean training hours at a speed of one sample a second (S above).
        shown_hours: mean hours of communication that shows, at least (C above).
        longest_hours: mean training hours that a deadline leaves.
    """

    usd_per_hour: Floats
    speed: Floats
    most: Floats
    fleet_usd_per_hour: Floats
    reclaims: Floats
    unit_hours: Floats
    shown_hours: Floats
    longest_hours: Floats

    def least_usd(self) -> Floats:
        """Least expected USD of any mix of each pair, whatever its nodes; infinite where none keeps the deadline."""
        usd = np.full(self.unit_hours.shape, np.inf)
        for side in (0, 1):
            for nodes in (1.0, self.most[:, 1 - side]):
                usd = np.minimum(usd, self._least_on_edge(side, nodes))
        return usd

    def least_usd_of(self, pair: NDArray[np.intp], nodes: NDArray[np.int64]) -> Floats:
        """Least expected USD of so many nodes (x 2) of each pair; infinite where they miss the deadline."""
        hours = self.unit_hours[pair] / (self.speed[pair] * nodes).sum(axis=1) + self.shown_hours[pair]
        usd_per_hour = (self.usd_per_hour[pair] * nodes).sum(axis=1) + self.fleet_usd_per_hour[pair]
        usd = usd_per_hour * (RESTART_HOURS + self._longer()[pair] * hours)
        return np.where(hours <= self.longest_hours[pair], usd, np.inf)

    def _longer(self) -> Floats:
        progress = 1.0 - self.reclaims * RESTART_HOURS
        with np.errstate(divide="ignore"):
            return np.where(progress > 0, 1.0 / progress, np.inf)

    def _least_on_edge(self, side: int, nodes: Floats | float) -> Floats:
        """The least of F where group ``side`` varies and the other has ``nodes``."""
        p, v, most = self.usd_per_hour[:, side], self.speed[:, side], self.most[:, side]
        k = self.usd_per_hour[:, 1 - side] * nodes + self.fleet_usd_per_hour
        u = self.speed[:, 1 - side] * nodes
        hours, fixed = self._longer() * self.unit_hours, self._longer() * self.shown_hours + RESTART_HOURS
        left = self.longest_hours - self.shown_hours
        with np.errstate(divide="ignore", invalid="ignore"):
            slowest = np.where(left > 0, self.unit_hours / left, np.inf)
            fewest = np.maximum(1.0, (slowest - u) / v)
            turn = np.sqrt(hours * np.maximum(0.0, k * v - p * u) / (p * fixed))
            x = np.clip((turn - u) / v, fewest, most)
            usd = (p * x + k) * (hours / (v * x + u) + fixed)
        # A hair's breadth, so that rounding never makes a mix at the limit miss it.
        return np.where((fewest <= most * (1 + 1e-9)) & ~np.isnan(usd), usd, np.inf)


def longest_hours(deadline: float | None, log_error: Floats) -> Floats:
    """Mean training hours that can keep a deadline at the 95th percentile, at most; one for each error.

    The spread of an outcome is at least that of the estimate. A lognormal distribution's 95th percentile rises with its
    mean, and with its spread until that is 67 times the mean for the errors at hand, which waiting for spot nodes never
    comes near; so the hours without any interruption bound it.
    """
    if deadline is None:
        return np.full(log_error.shape, np.inf)
    spread = np.sqrt(np.expm1(log_error**2))
    low, width = np.zeros(log_error.shape), np.full(log_error.shape, deadline)
    steps = np.linspace(0.0, 1.0, 65)[:, None]
    for _ in range(5):
        hours = low + width * steps
        _, p95 = lognormal_percentiles(RESTART_HOURS + hours, spread * hours)
        low = low + width * steps[np.maximum((p95 <= deadline).sum(axis=0) - 1, 0), 0]
        width = width / 64
    return np.asarray((low + width) * (1 + 1e-9))
