"""Times to live of the catalog's facts, with their reasons.

Commands warn of an older fact on standard error and go on; only ``--max-age`` makes them stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime

from optimizer.catalog.model import Catalog
from optimizer.errors import DataStaleError
from optimizer.hardware import DERIVED_SPOT, Offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Ttl:
    """Days before gpufleet warns of a fact's age, and why."""

    days: int
    reason: str


ON_DEMAND = Ttl(
    days=90, reason="AWS cut P4 and P5 prices by up to 45% in June 2025 and raises or cuts rarely otherwise"
)
RESERVED = Ttl(days=90, reason="reserved prices follow on-demand prices")
SPOT_HISTORY = Ttl(days=1, reason="spot prices move with supply, several times a day at most")
SPOT_ADVISOR = Ttl(days=30, reason="the advisor averages the trailing 30 days")
INSTANCE_TYPES = Ttl(days=365, reason="a type's hardware does not change; new types appear")
ZONES = Ttl(days=180, reason="AWS adds zones to a type over months")
UNIT_PRICES = Ttl(
    days=365, reason="prices of volumes, storage, endpoints, gateways and requests have changed at most once a year"
)

BY_FACT = {
    "on-demand prices": ON_DEMAND,
    "reserved prices": RESERVED,
    "interruption bands": SPOT_ADVISOR,
    "instance types": INSTANCE_TYPES,
    "zones": ZONES,
    "unit prices": UNIT_PRICES,
}


def source_ttl(name: str, origin: str) -> Ttl | None:
    """Return the time to live of a catalog source; None for a datasheet, which does not age."""
    if name == "spot prices":
        return SPOT_ADVISOR if origin == DERIVED_SPOT else SPOT_HISTORY
    return BY_FACT.get(name)


def age_days(as_of: date, today: date | None = None) -> int:
    """Return whole days since ``as_of``, by the UTC calendar."""
    return ((today or datetime.now(UTC).date()) - as_of).days


def stale_lines(catalog: Catalog, today: date | None = None) -> list[str]:
    """Return one line for each kind of price that is older than its time to live."""
    lines = []
    for source in catalog.sources:
        if not source.name.endswith(" prices") or source.name == "unit prices":
            continue
        ttl, age = source_ttl(source.name, source.origin), age_days(source.as_of, today)
        if ttl is not None and age > ttl.days:
            newest = "" if source.newest == source.as_of else f", the newest from {source.newest}"
            lines.append(
                f"{source.name} ({source.origin}) are up to {age} days old: the oldest from {source.as_of}{newest}"
            )
    return lines


def check_max_age(
    offers: Iterable[Offer], max_age_days: int, today: date | None = None, *, next_step: str = ""
) -> None:
    """Refuse offers with a price older than the user allows.

    The default ``next_step`` is the refresh of the oldest price's AWS region.

    Raises:
        DataStaleError: a price is older.
    """
    old = [
        (age_days(price.as_of, today), offer, kind, price)
        for offer in offers
        for kind, price in (("on-demand", offer.on_demand), ("reserved", offer.reserved_1yr), ("spot", offer.spot))
        if price is not None and age_days(price.as_of, today) > max_age_days
    ]
    if not old:
        return
    age, offer, kind, price = max(old, key=lambda price: price[0])
    raise DataStaleError(
        f"{len(old)} prices are older than --max-age {max_age_days} days; "
        f"the oldest is {kind} {offer.instance.name} in {offer.region}: {age} days ({price.source}, {price.as_of})",
        limit=f"at most {max_age_days} days",
        why="you asked for it with --max-age",
        next_step=next_step or f"gpufleet catalog refresh --region {offer.region}",
    )
