"""A run as the simulation knows it: work, deadline, prices, delays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optimizer.contract.errors import InvalidInputError
from optimizer.performance.types import Floats

# Quantile of the restart that a deadline margin covers, in standard deviations: one launch in 300,000 is slower.
_TAIL_Z = 4.5
_Z95 = 1.6448536269514722


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """A run to simulate.

    Attributes:
        price_ratio: on-demand price over spot price.
        restart_hours: mean hours from a launch to the first new step.
        restart_p95_hours: 95th percentile of that time, lognormal; None: constant.
        checkpoint_hours: checkpoint interval. An interruption loses a uniform part of it; 0 loses nothing. A node that
            the policy itself ends saves first.
    """

    work_hours: float
    deadline_hours: float
    price_ratio: float
    restart_hours: float
    restart_p95_hours: float | None = None
    checkpoint_hours: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a job that no policy can finish and a tail that no lognormal distribution has."""
        if self.deadline_hours < self.work_hours + self.restart_hours:
            raise InvalidInputError(
                f"the deadline is {self.deadline_hours:g} h",
                limit=f"work and one restart, {self.work_hours + self.restart_hours:g} h",
                why="even on-demand nodes from start to end would be late",
                next_step="a longer --deadline-hours",
            )
        if self.restart_p95_hours is not None:
            self._restart_sigma()

    @property
    def on_demand_cost(self) -> float:
        """Cost of on-demand from start to end, in hours of on-demand."""
        return self.work_hours + self.restart_hours

    @property
    def restart_bound_hours(self) -> float:
        """Restart time that a deadline margin covers."""
        if self.restart_p95_hours is None:
            return self.restart_hours
        sigma = self._restart_sigma()
        return self.restart_hours * math.exp(_TAIL_Z * sigma - sigma**2 / 2)

    def draw_restarts(self, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Restart times, h."""
        if self.restart_p95_hours is None:
            return np.full(shape, self.restart_hours)
        sigma = self._restart_sigma()
        return random.lognormal(math.log(self.restart_hours) - sigma**2 / 2, sigma, shape)

    def draw_lost(self, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Hours of work since the last checkpoint, as an interruption finds them."""
        return random.uniform(0, self.checkpoint_hours, shape)

    def _restart_sigma(self) -> float:
        """Sigma of the lognormal distribution with this mean m and 95th percentile: p95 = m exp(z s - s²/2)."""
        assert self.restart_p95_hours is not None
        log_ratio = math.log(self.restart_p95_hours / self.restart_hours) if self.restart_hours else math.inf
        if not 0 <= log_ratio < _Z95**2 / 2:
            raise InvalidInputError(
                f"the restart's 95th percentile is {self.restart_p95_hours:g} h",
                limit=f"between the mean, {self.restart_hours:g} h, and {math.exp(_Z95**2 / 2):.3g} times it",
                why="no lognormal distribution has another one",
                next_step="correct --restart-hours (the mean) or --restart-p95-hours",
            )
        return _Z95 - math.sqrt(_Z95**2 - 2 * log_ratio)
