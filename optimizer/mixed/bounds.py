"""The least that a mix of two groups of nodes can cost: what lets the search pass over nearly all of them, unweighed.

Notation, one pair of groups an element: x and y nodes, p and q USD per node-hour (the cheapest way to pay, and the
node's volumes), v and w samples a second of a node (``Physics.samples_per_second``), f USD per hour of the fleet.

1. A step of G samples takes at least G / (v x + w y) of computation, every rank busy with its best micro-batch, and the
   communication c that any step of the two shows. So the training hours are at least
   T(x, y) = S / (v x + w y) + C, where S are hours of a machine that does one sample a second and C the steps' c.
2. ``outcome`` makes of T useful hours at least R + T running hours, R a restart, as stalls, lost work and waiting only
   add; ``fleet_cost`` charges them all. So the expected cost is at least F(x, y) = (p x + q y + f) (R + T(x, y)).
3. Of mixes of one speed v x + w y, T is one number, and F is linear: its least is at an end of the segment, where x or
   y is at its own least or most. So over all real x and y, F is least on the four edges of their box, and there it has
   a closed form: along y = const, with k = q y + f and u = w y, F(x) = (p x + k) (S / (v x + u) + C + R) rises in x
   where p u >= k v, and is convex otherwise, least where (v x + u)^2 = S (k v - p u) / (p (C + R)).
4. A deadline binds the 95th percentile of hours, which rises with T: it asks of v x + w y at least a speed, and cuts
   the edges short (the ends of the segments of 3 that it keeps stay on them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.outcome import lognormal_percentiles

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Pairs of groups to bound; arrays of one shape.

    Attributes:
        usd_per_hour: of a node of each group, at least.
        speed: samples a second of a node of each group, at most.
        most: nodes of each group, at most.
        fleet_usd_per_hour: what the fleet pays beside its nodes.
        unit_hours: mean training hours at a speed of one sample a second (S above).
        shown_hours: mean hours of communication that shows, at least (C above).
        longest_hours: mean training hours that a deadline leaves.
    """

    usd_per_hour: tuple[Floats, Floats]
    speed: tuple[Floats, Floats]
    most: tuple[Floats, Floats]
    fleet_usd_per_hour: Floats
    unit_hours: Floats
    shown_hours: Floats
    longest_hours: Floats

    def take(self, at: NDArray[np.intp]) -> Pair:
        """The pairs at these positions."""
        return Pair(
            usd_per_hour=(self.usd_per_hour[0][at], self.usd_per_hour[1][at]),
            speed=(self.speed[0][at], self.speed[1][at]),
            most=(self.most[0][at], self.most[1][at]),
            fleet_usd_per_hour=self.fleet_usd_per_hour[at],
            unit_hours=self.unit_hours[at],
            shown_hours=self.shown_hours[at],
            longest_hours=self.longest_hours[at],
        )

    def least_usd(self) -> Floats:
        """Least expected USD of any mix of each pair, whatever its nodes; infinite where none keeps the deadline."""
        (p, q), (v, w), (most_x, most_y) = self.usd_per_hour, self.speed, self.most
        sides = [
            self._edge(p, v, most_x, q * y + self.fleet_usd_per_hour, w * y) for y in (np.ones_like(most_y), most_y)
        ]
        sides += [
            self._edge(q, w, most_y, p * x + self.fleet_usd_per_hour, v * x) for x in (np.ones_like(most_x), most_x)
        ]
        least: Floats = np.minimum.reduce(sides)
        return least

    def least_usd_of(self, x: Floats, y: Floats) -> Floats:
        """Least expected USD of ``x`` and ``y`` nodes; infinite where they miss the deadline."""
        (p, q), (v, w) = self.usd_per_hour, self.speed
        hours = self.unit_hours / (v * x + w * y) + self.shown_hours
        usd = (p * x + q * y + self.fleet_usd_per_hour) * (RESTART_HOURS + hours)
        return np.where(hours <= self.longest_hours, usd, np.inf)

    def _edge(self, p: Floats, v: Floats, most: Floats, k: Floats, u: Floats) -> Floats:
        """The least of F along one edge: ``p``, ``v`` of the nodes that vary, ``k``, ``u`` of what stays."""
        hours = self.longest_hours - self.shown_hours
        with np.errstate(divide="ignore", invalid="ignore"):
            slowest = np.where(hours > 0, self.unit_hours / hours, np.inf)
            fewest = np.maximum(1.0, (slowest - u) / v)
            turn = self.unit_hours * np.maximum(0.0, k * v - p * u) / (p * (self.shown_hours + RESTART_HOURS))
            x = np.clip((np.sqrt(turn) - u) / v, fewest, most)
            usd = (p * x + k) * (self.unit_hours / (v * x + u) + self.shown_hours + RESTART_HOURS)
        # A hair's breadth, so that rounding never makes a mix at the limit miss it.
        return np.where(fewest <= most * (1 + 1e-9), usd, np.inf)


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
