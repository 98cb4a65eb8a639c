"""Times to live of the catalog's facts, with their reasons.

Commands warn of an older fact on standard error and go on. Spot prices older than their limit are not trusted alone:
``recommend`` puts a plan at a current price first, and ``stack set`` refuses the plan.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from optimizer.catalog.model import Catalog, Source
from optimizer.contract.hardware import DERIVED_SPOT, HourlyPrice

if TYPE_CHECKING:
    from optimizer.contract.plan import PlanPrice

SPOT_HISTORY_DAYS = 1  # spot prices move with supply, several times a day at most
SPOT_ADVISOR_DAYS = 30  # the advisor averages the trailing 30 days
DAYS_BY_FACT = {
    # AWS cut P4 and P5 prices by up to 45% in June 2025 and raises or cuts rarely otherwise.
    "on-demand prices": 90,
    "reserved prices": 90,  # they follow on-demand prices
    "Capacity Block rates": 90,  # AWS updates them every quarter or so
    "interruption bands": SPOT_ADVISOR_DAYS,
    "capacity events": SPOT_ADVISOR_DAYS,  # pools change as fast for a stack as for the advisor
    "instance types": 365,  # a type's hardware does not change; new types appear
    "zones": 180,  # AWS adds zones to a type over months
    # Prices of volumes, storage, endpoints, gateways and requests have changed at most once a year.
    "unit prices": 365,
}


def source_ttl_days(name: str, origin: str) -> int | None:
    """Return the time to live of a catalog source, days; None for a datasheet, which does not age."""
    return spot_limit_days(origin) if name == "spot prices" else DAYS_BY_FACT.get(name)


def is_old(source: Source, today: date | None = None) -> bool:
    """Return whether a catalog source has a fact that is older than its time to live."""
    limit = source_ttl_days(source.name, source.origin)
    return limit is not None and age_days(source.as_of, today) > limit


def spot_limit_days(source: str) -> int:
    """Return the days for which a spot price of this source is current."""
    return SPOT_ADVISOR_DAYS if source == DERIVED_SPOT else SPOT_HISTORY_DAYS


def is_stale_spot(price: HourlyPrice | PlanPrice, today: date | None = None) -> bool:
    """Return whether a spot price is older than its limit."""
    return age_days(price.as_of, today) > spot_limit_days(price.source)


def age_days(as_of: date, today: date | None = None) -> int:
    """Return whole days since ``as_of``, by the UTC calendar."""
    return ((today or datetime.now(UTC).date()) - as_of).days


def stale_lines(catalog: Catalog, today: date | None = None) -> list[str]:
    """Return one line for each kind of price, and of reclaim rate, that is older than its time to live."""
    lines = []
    for source in catalog.sources:
        is_shown = source.name in ("on-demand prices", "reserved prices", "spot prices", "interruption bands")
        if is_shown and is_old(source, today):
            age = age_days(source.as_of, today)
            newest = "" if source.newest == source.as_of else f", the newest from {source.newest}"
            lines.append(
                f"{source.name} ({source.origin}) are up to {age} days old: the oldest from {source.as_of}{newest}"
            )
    return lines
