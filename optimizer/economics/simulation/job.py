"""A run as the simulation knows it: work, deadline, prices, delays."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.contract.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedJob:
    """A run to simulate.

    Attributes:
        price_ratio: on-demand price over spot price.
        restart_hours: from a launch to the first new step.
        checkpoint_hours: checkpoint interval. An interruption loses a uniform part of it; 0 loses nothing. A node that
            the policy itself ends saves first.
    """

    work_hours: float
    deadline_hours: float
    price_ratio: float
    restart_hours: float
    checkpoint_hours: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a job that no policy can finish."""
        if self.deadline_hours < self.work_hours + self.restart_hours:
            raise InvalidInputError(
                f"the deadline is {self.deadline_hours:g} h",
                limit=f"work and one restart, {self.work_hours + self.restart_hours:g} h",
                why="even on-demand nodes from start to end would be late",
                next_step="a longer --deadline-hours",
            )

    @property
    def on_demand_cost(self) -> float:
        """Cost of on-demand from start to end, in hours of on-demand."""
        return self.work_hours + self.restart_hours
