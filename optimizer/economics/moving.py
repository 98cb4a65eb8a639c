"""Minutes and dollars of moving a run to another region, counted before it is decided, and where to go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.catalog import Catalog
from optimizer.catalog.region_transfer import transfer_usd
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import GIB
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.staging import S3_BYTES_PER_S_PER_CONNECTION


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """Hours in which the run stands still, and USD, by part; ``drain`` is the most that the nodes may take to save."""

    drain_hours: float
    drain_usd: float
    copy_hours: float
    copy_usd: float
    start_hours: float
    start_usd: float

    @property
    def hours(self) -> float:
        """Hours from the last step in one region to the first in the other, without a wait for capacity."""
        return self.drain_hours + self.copy_hours + self.start_hours

    @property
    def usd(self) -> float:
        """USD of all parts."""
        return self.drain_usd + self.copy_usd + self.start_usd


def price_move(
    catalog: Catalog, old: FleetPlan, new: FleetPlan, *, gib: float, writes: int, copies: int, running: bool = True
) -> MoveCost:
    """Price the move of ``gib``, written by ``writes`` requests of S3, ``copies`` at a time.

    The plans' ``spot_policy`` is what their stacks carry out. Nodes of ``old``, where they are ``running``, are paid
    while they save, those of ``new`` while they boot, copy data and load. A copy inside S3 is taken to be as fast as a
    GET; nobody measured one between regions.
    """
    drain_hours = old.terminate_timeout_s / 3600 if running else 0.0
    start_hours = RESTART_HOURS + (new.staging.node_hours if new.staging else 0.0)
    write_usd = catalog.unit_price("s3-write-request", new.region).usd
    return MoveCost(
        drain_hours=drain_hours,
        drain_usd=drain_hours * _usd_per_hour(old),
        copy_hours=gib * GIB / (copies * S3_BYTES_PER_S_PER_CONNECTION) / 3600,
        copy_usd=transfer_usd(gib, old.region, new.region) + writes * write_usd,
        start_hours=start_hours,
        start_usd=start_hours * _usd_per_hour(new),
    )


def _usd_per_hour(plan: FleetPlan) -> float:
    """Mean cost of a running hour."""
    planned = plan.spot_policy or plan
    return planned.cost_usd.expected / planned.hours.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Rest of a run in one region: expected USD, and hours at the 95th percentile; ``move`` comes on top."""

    move: MoveCost
    usd: float
    hours_p95: float


def choose_region(rests: Mapping[str, Rest], *, left_usd: float | None, left_hours: float | None) -> str | None:
    """Return the cheapest region that keeps the deadline, else the earliest; None where the ceiling pays for none.

    ``left_usd`` and ``left_hours`` are until ceiling and deadline; None is no limit.
    """

    def order(region: str) -> tuple[bool, float]:
        rest = rests[region]
        hours, usd = rest.move.hours + rest.hours_p95, rest.move.usd + rest.usd
        late = left_hours is not None and hours > left_hours
        return late, hours if late else usd

    paid = [region for region, rest in rests.items() if left_usd is None or rest.move.usd + rest.usd <= left_usd]
    return min(paid, key=order, default=None)
