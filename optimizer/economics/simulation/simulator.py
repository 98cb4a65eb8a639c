"""The simulator: one run that may take its nodes from any of 1 to n pools, tick by tick.

A policy knows a pool by its own launches only. A launch is tried in one pool at a time, for the whole gang; a refusal
takes TRY_HOURS and no money, as a request that is all or nothing bills no node. Nodes that work go on until their
pool has fewer than the gang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from bootstrap.contract.pool_policy import TRY_HOURS, Mode, RunView
from bootstrap.contract.pools import PoolEvent, came, left, reclaimed, refused
from bootstrap.contract.spot_values import Delays
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.types import Bools, Floats

# Interruptions of a run that lose work of their own; later ones use the draws again.
_DRAWS = 64
DONE_HOURS = 1e-9
# A run's pools are numbered.
PoolsView = RunView[int]


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


class SpotPolicy(Protocol):
    """Decides for one run; made anew for each."""

    def keep(self, view: PoolsView) -> Mode:
        """Return what runs until the next tick where no launch brings spot nodes; SPOT keeps the running ones."""

    def next_try(self, view: PoolsView) -> int | None:
        """Return the pool in which to try a launch now, beside the running nodes; None: no more in this tick."""

    def note(self, event: PoolEvent, pool: int, hours: float) -> None:
        """Learn what a pool did, ``hours`` after the start."""


NewPolicy = Callable[[int, SimulatedJob], SpotPolicy]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Simulated runs, one an element.

    Attributes:
        cost: hours of on-demand that would cost as much.
        late: the work was not done at the deadline, where the simulation ends.
        refusals, moves: launches that were refused, and that came in another pool than the last; None: unknown.
    """

    cost: Floats
    late: Bools
    spot_hours: Floats
    on_demand_hours: Floats
    interruptions: Floats
    refusals: Floats | None = None
    moves: Floats | None = None


def simulate(
    available: Bools,
    gap_hours: float,
    job: SimulatedJob,
    prices: Floats,
    new_policy: NewPolicy,
    *,
    seed: int,
) -> Runs:
    """Play a policy in every window.

    All policies lose the same work: a run's n-th interruption draws the same hours.

    Args:
        available: the pool has the gang; shape (runs, pools, ticks).
        prices: an hour of spot in each pool, shape (runs, pools), or (runs, pools, ticks); on-demand's is 1.
        new_policy: makes a policy from the number of pools and the job.
    """
    losses = np.random.default_rng(seed).uniform(0, job.checkpoint_hours, (len(available), _DRAWS)).tolist()
    played = []
    for window, by_pool, lost in zip(available, prices, losses, strict=True):
        price = [dict(enumerate(row)) for row in np.atleast_2d(by_pool.T).tolist()]
        price *= window.shape[1] // len(price)
        policy = new_policy(len(window), job)
        run = SimulatedRun(window.tolist(), gap_hours, job, price, policy, lost)
        run.play()
        played.append(run)

    late = np.array([run.work > DONE_HOURS for run in played])
    names = [field.name for field in fields(Runs) if field.name != "late"]
    return Runs(late=late, **{name: np.array([getattr(run, name) for run in played], dtype=float) for name in names})


class SimulatedRun:
    """One run, from its start to the end of its work or its deadline.

    A subclass may carry out what the policy decides: ``launch``, ``advance``, ``end`` and ``reclaim``.

    Attributes:
        elapsed_hours: from the start to the newest change.
        work, cost: hours of work left, and hours of on-demand paid.
        mode, pool: what runs, and the pool of the newest spot nodes; -1 before any came.
        loading_hours: restart time left until the running nodes work.
    """

    def __init__(
        self,
        available: list[list[bool]],
        gap_hours: float,
        job: SimulatedJob,
        prices: Sequence[Mapping[int, float]],
        policy: SpotPolicy,
        losses: list[float],
    ) -> None:
        self._available, self._gap_hours, self._job = available, gap_hours, job
        self._prices, self._policy, self._losses = prices, policy, losses
        self._present, self._tick = prices[0], 0
        self._delays = Delays(
            restart_hours=job.restart_hours,
            restart_bound_hours=job.restart_hours,
            lost_bound_hours=job.checkpoint_hours,
        )
        self.mode, self.pool = Mode.IDLE, -1
        self.loading_hours = self._fresh = 0.0
        self._next_try_hours = 0.0
        self.elapsed_hours = 0.0
        self.work = job.work_hours
        self.cost = self.spot_hours = self.on_demand_hours = 0.0
        self.interruptions = self.moves = self.refusals = 0

    def play(self) -> None:
        """Play all ticks."""
        for tick, prices in enumerate(self._prices):
            if self.work <= DONE_HOURS:
                return
            self._tick, self._present, elapsed = tick, prices, tick * self._gap_hours
            self.decide(elapsed, min(self._gap_hours, self._job.deadline_hours - elapsed))

    def decide(self, elapsed: float, step: float) -> None:
        """Do what the policy says until its next decision, ``step`` hours on."""
        if self.mode is Mode.SPOT and not self.has_capacity(self.pool):
            self.reclaim(elapsed)
        view = self.view(elapsed, step)
        kept = self._policy.keep(view)
        if kept is not self.mode:
            self.end(elapsed)
        self.elapsed_hours = elapsed
        tried, found = self._try_pools(elapsed, step, view, hurry=kept is not self.mode)
        self.advance(tried)
        if found is not None:
            self.end(elapsed + tried)
            self.launch(Mode.SPOT, found)
        elif kept is not self.mode:
            self.launch(kept, self.pool)
        self.advance(step - tried)

    def has_capacity(self, pool: int) -> bool:
        """Return whether a pool has the gang in the present tick."""
        return self._available[pool][self._tick]

    def view(self, elapsed: float, step: float) -> PoolsView:
        """Build the run's state as its policy sees it."""
        return RunView(
            delays=self._delays,
            now_s=elapsed * 3600,
            elapsed_hours=elapsed,
            left_hours=self._job.deadline_hours - elapsed,
            step_hours=step,
            work_hours=self.work,
            whole_hours=self._job.work_hours,
            prices=self._present,
            mode=self.mode,
            pool=self.pool,
            loading_hours=self.loading_hours,
        )

    def _try_pools(self, elapsed: float, step: float, view: PoolsView, *, hurry: bool) -> tuple[float, int | None]:
        """Hours from the tick's start to the last answer, and the pool that gave its nodes.

        A refusal that is still awaited from the tick before does not hold up a launch on demand (``hurry``).
        """
        tried = max(0.0, self._next_try_hours - elapsed)
        if tried and hurry:
            return 0.0, None
        while tried < step and (pool := self._policy.next_try(view)) is not None:
            if self.has_capacity(pool):
                self._policy.note(came, pool, elapsed + tried)
                return tried, pool
            self._policy.note(refused, pool, elapsed + tried)
            self.refusals += 1
            tried += TRY_HOURS
            self._next_try_hours = elapsed + tried
        return min(tried, step), None

    def launch(self, mode: Mode, pool: int) -> None:
        """Start nodes."""
        self.moves += mode is Mode.SPOT and self.pool not in (-1, pool)
        self.loading_hours = self._job.restart_hours
        self._fresh = 0.0
        self.mode, self.pool = mode, pool

    def end(self, now_hours: float) -> None:
        """End running nodes by choice, with a checkpoint; nothing may run."""
        if self.mode is Mode.SPOT:
            self._policy.note(left, self.pool, now_hours)
        self.mode = Mode.IDLE

    def reclaim(self, now_hours: float) -> None:
        """Take the spot nodes back."""
        self._policy.note(reclaimed, self.pool, now_hours)
        self.work += min(self._losses[self.interruptions % len(self._losses)], self._fresh)
        self.interruptions += 1
        self.mode = Mode.IDLE

    def advance(self, hours: float) -> None:
        """Let the running nodes, if any, start and work for ``hours``."""
        if self.mode is Mode.IDLE:
            self.elapsed_hours += hours
            return
        hours = min(hours, self.loading_hours + self.work)
        loaded = min(self.loading_hours, hours)
        self.elapsed_hours += hours
        self.loading_hours -= loaded
        self.work -= hours - loaded
        self._fresh += hours - loaded
        if self.mode is Mode.SPOT:
            self.spot_hours += hours
            self.cost += hours * self._present[self.pool]
        else:
            self.on_demand_hours += hours
            self.cost += hours
