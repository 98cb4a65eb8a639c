"""Refresh a catalog from AWS, region by region and source by source.

A source that fails keeps its last good data in that region. A fact that a good answer lacks goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

from bootstrap.contract.capacity import PoolEvents
from bootstrap.contract.words import counted
from optimizer.aws import clients, errors
from optimizer.catalog import invariants, snapshot
from optimizer.catalog.model import UNIT_ITEMS, UnitPrice
from optimizer.catalog.sources import Skipped, capacity_manager, instance_types, offerings, price_list, spot_history
from optimizer.catalog.sources.price_list import InstancePrice
from optimizer.catalog.sources.spot_history import ZonePrice
from optimizer.catalog.tables import Tables
from optimizer.contract.errors import DataMissingError, GpufleetError
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer, Zones

# Well below the limits of EC2's describe calls (by account and region) and of the price list (by account)
# (https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html).
REGIONS_AT_ONCE = 6

T = TypeVar("T")


@dataclass(kw_only=True)
class RegionAnswer:
    """Answers of one region's sources; None where a source failed. ``spot_types`` were asked for, all where None."""

    region: str
    types: dict[str, InstanceType] | None = None
    zones: dict[str, tuple[str, ...]] | None = None
    prices: dict[str, InstancePrice] | None = None
    spot: dict[str, tuple[ZonePrice, ...]] | None = None
    spot_types: frozenset[str] | None = None
    units: dict[str, float] = field(default_factory=dict)
    own_pools: dict[str, PoolEvents] = field(default_factory=dict)  # of all regions, where Capacity Manager is enabled
    failures: list[Skipped] = field(default_factory=list)  # sources whose last good data stays
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Sources and rows that were not used, in words."""
        return [*map(str, self.skipped), *(f"{failure}; the last good data stays" for failure in self.failures)]

    def was_read(self) -> bool:
        """True where any source answered."""
        answers = (self.types, self.zones, self.prices, self.spot)
        return any(answer is not None for answer in answers) or bool(self.units)


@dataclass(frozen=True, kw_only=True)
class RefreshResult:
    """The folder written, one answer a region, and prices left out because they contradicted another."""

    directory: Path
    answers: tuple[RegionAnswer, ...]
    dropped: tuple[str, ...]


def enabled_regions() -> tuple[str, ...]:
    """Regions the account can use; GpufleetError where AWS could not be asked."""
    try:
        answer = clients.ec2(clients.HOME_REGION).describe_regions()
    except errors.AWS_ERRORS as error:
        raise _nothing_refreshed([errors.reason(error)]) from error
    return tuple(sorted(region["RegionName"] for region in answer["Regions"]))


def refresh(
    regions: Sequence[str],
    *,
    spot_types: Collection[str] | None = None,
    directory: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> RefreshResult:
    """Read ``regions`` and write the catalog they make together with the known facts of other regions.

    With ``spot_types`` only the spot prices in force of these types are read, in a few calls a region.

    Raises:
        GpufleetError: nothing could be read, or the result would break an invariant; nothing is written then.
    """
    tables, now = Tables.of(snapshot.read_newest()), datetime.now(UTC)
    known_types = {instance.name for instance in tables.instance_types}
    known_regions = {offer.region for offer in tables.offers}

    def read(region: str) -> RegionAnswer:
        if spot_types is None:
            answer = read_region(region, known_types, now, may_be_empty=region not in known_regions)
        else:
            answer = _read_spot(region, spot_types, tables)
        progress(f"{region}: {'read' if answer.was_read() else 'failed'}")
        return answer

    with ThreadPoolExecutor(max_workers=REGIONS_AT_ONCE) as pool:
        answers = tuple(pool.map(read, regions))
    if not any(answer.was_read() for answer in answers):
        raise _nothing_refreshed([failure.reason for answer in answers for failure in answer.failures])
    for answer in answers:
        tables = merge(tables, answer, now.date())
    tables, dropped = drop_contradictions(tables)
    catalog = snapshot.build_catalog(tables, made_at=now, origin="the refreshed catalog")
    if broken := invariants.check(catalog):
        raise GpufleetError(
            f"the refreshed catalog breaks {counted(len(broken), 'rule')}, and is not kept:\n  "
            + "\n  ".join(map(str, broken[:20])),
            why="money is spent by it",
            next_step="the last good prices stay in use; report the lines above",
        )
    target = directory or snapshot.user_directory()
    snapshot.write_snapshot(target, tables, made_at=now)
    if own := {name: events for answer in answers for name, events in answer.own_pools.items()}:
        try:
            snapshot.keep_events(capacity_manager.NAME, "", own, now=now)
        except (DataMissingError, OSError) as error:
            dropped.append(f"EC2 Capacity Manager's interruptions are not kept: {error}")
    return RefreshResult(directory=target, answers=answers, dropped=tuple(dropped))


def _read_spot(region: str, types: Collection[str], tables: Tables) -> RegionAnswer:
    answer = RegionAnswer(region=region, spot_types=frozenset(types))
    offered = {
        offer.instance.name: offer.zone_ids
        for offer in tables.offers
        if offer.region == region and offer.instance.name in types and offer.zones
    }
    try:
        ec2 = clients.ec2(region)
        entries = spot_history.fetch(ec2, offered) if offered else []
        zone_ids = spot_history.fetch_zone_ids(ec2) if entries else {}
        answer.spot, answer.skipped = spot_history.parse(entries, zone_ids, offered)
    except errors.AWS_ERRORS as error:
        answer.failures.append(Skipped(spot_history.NAME, region, errors.reason(error)))
    return answer


def read_region(region: str, known_types: set[str], now: datetime, *, may_be_empty: bool) -> RegionAnswer:
    """Ask every source; each fails alone. An empty answer is a failure unless it ``may_be_empty``."""
    answer, today = RegionAnswer(region=region), now.date()
    # Reason by service that refuses every call, and is not asked again.
    down: dict[str, str] = {}

    def fail(source: str, reason: str) -> None:
        answer.failures.append(Skipped(source, region, reason))

    def attempt(service: str, source: str, call: Callable[[], T]) -> T | None:
        if service in down:
            fail(source, down[service])
            return None
        try:
            result = call()
        except errors.AWS_ERRORS as error:
            reason = errors.reason(error)
            fail(source, reason)
            is_refused = service == "pricing" and errors.is_not_permitted(error)  # pricing has one action only
            if is_refused or errors.stops_all_calls(error):
                down[service] = reason
            return None
        if not result and not may_be_empty:
            fail(source, "AWS answered with nothing usable")
        return result or None

    def usable(parsed: tuple[T, list[Skipped]]) -> T:
        answer.skipped += parsed[1]
        return parsed[0]

    ec2 = attempt("ec2", "connection", lambda: clients.ec2(region))
    pricing = attempt("pricing", "connection", clients.pricing)
    if ec2 is None or pricing is None:
        return answer
    answer.types = attempt(
        "ec2",
        instance_types.NAME,
        lambda: usable(instance_types.parse(instance_types.fetch(ec2), source=instance_types.ORIGIN, as_of=today)),
    )
    types = known_types | set(answer.types or ())
    answer.zones = attempt("ec2", offerings.NAME, lambda: offerings.parse(offerings.fetch(ec2, types)))
    answer.prices = attempt(
        "pricing",
        price_list.NAME,
        lambda: usable(price_list.parse_instances(price_list.fetch_instances(pricing, region), region, types)),
    )
    offered = set(answer.zones or answer.types or ())
    if offered:
        answer.spot = attempt(
            "ec2",
            spot_history.NAME,
            lambda: usable(
                spot_history.parse(spot_history.fetch(ec2, offered), spot_history.fetch_zone_ids(ec2), answer.zones)
            ),
        )
    for item in UNIT_ITEMS:

        def read_unit(item: str = item) -> float | None:
            return usable(price_list.parse_unit(price_list.fetch_unit(pricing, item, region), item, region))

        usd = attempt("pricing", f"price of {item}", read_unit)
        if usd is not None:
            answer.units[item] = usd
    with suppress(*errors.AWS_ERRORS):  # most accounts have not enabled it, or may not ask
        if "ec2" not in down and capacity_manager.is_enabled(ec2):
            may_be_empty = True
            own = attempt(
                "ec2", capacity_manager.NAME, lambda: capacity_manager.parse(capacity_manager.fetch(ec2, now), types)
            )
            answer.own_pools = own or {}
    return answer


def merge(tables: Tables, answer: RegionAnswer, today: date) -> Tables:
    """Merge one region's answers; earlier facts of a failed source stay."""
    region = answer.region
    types = {instance.name: instance for instance in tables.instance_types} | (answer.types or {})
    offers = [replace(offer, instance=types[offer.instance.name]) for offer in tables.offers]
    own = {offer.instance.name: offer for offer in offers if offer.region == region}
    for source in (answer.zones, answer.prices, answer.spot):
        for name in source or ():
            if name in types:
                own.setdefault(name, Offer(instance=types[name], region=region))
    merged = [_merge_offer(offer, answer, today) for offer in own.values()]
    units = [
        UnitPrice(item=item, region=region, usd=usd, source=price_list.ORIGIN, as_of=today)
        for item, usd in answer.units.items()
    ]
    return Tables(
        instance_types=list(types.values()),
        offers=[offer for offer in offers if offer.region != region]
        + [offer for offer in merged if offer.zones or offer.on_demand],
        unit_prices=[price for price in tables.unit_prices if price.region != region or price.item not in answer.units]
        + units,
    )


def _merge_offer(offer: Offer, answer: RegionAnswer, today: date) -> Offer:
    name = offer.instance.name
    facts: dict[str, Any] = {}
    if answer.zones is not None:
        ids = answer.zones.get(name)
        facts["zones"] = Zones(ids=ids, source=offerings.ORIGIN, as_of=today) if ids else None
    if answer.prices is not None:
        price = answer.prices.get(name)
        for kind in ("on_demand", "reserved_1yr"):
            usd: float | None = getattr(price, kind, None)
            facts[kind] = None if usd is None else HourlyPrice(usd_per_hour=usd, source=price_list.ORIGIN, as_of=today)
    offer = replace(offer, **facts)
    if answer.spot is None or (answer.spot_types is not None and name not in answer.spot_types):
        return offer
    return offer.with_spot(
        HourlyPrice(usd_per_hour=usd, source=spot_history.PRICE_SOURCE, as_of=today, zone_id=zone_id)
        for usd, zone_id in answer.spot.get(name, ())
    )


def drop_contradictions(tables: Tables) -> tuple[Tables, list[str]]:
    """Leave out spot and reserved prices above on-demand, and spot prices of zones without the type; list them."""
    dropped = []
    offers = []
    for offer in tables.offers:
        zone_ids = offer.zone_ids
        kept: dict[str, list[HourlyPrice]] = {"spot": [], "reserved_1yr": []}
        for kind, price in (("reserved_1yr", offer.reserved_1yr), *(("spot", p) for p in offer.spot_by_zone)):
            if price is None:
                continue
            if offer.on_demand is not None and price.is_above(offer.on_demand):
                why = f"is above on-demand {offer.on_demand.usd_per_hour} ({offer.on_demand.as_of})"
            elif price.zone_id and price.zone_id not in zone_ids:
                as_of = offer.zones.as_of if offer.zones else None
                why = f"is of zone {price.zone_id}, which does not offer the type ({as_of})"
            else:
                kept[kind].append(price)
                continue
            dropped.append(
                f"{kind} price of {offer.instance.name} in {offer.region}: {price.usd_per_hour} USD per hour "
                f"({price.source}, {price.as_of}) {why}, left out"
            )
        offers.append(replace(offer, reserved_1yr=next(iter(kept["reserved_1yr"]), None)).with_spot(kept["spot"]))
    return tables._replace(offers=offers), dropped


def _nothing_refreshed(reasons: Sequence[str]) -> GpufleetError:
    unique = list(dict.fromkeys(reasons))
    return GpufleetError(
        "nothing could be read from AWS: " + "; ".join(unique[:5]),
        limit="at least one source of one region answers",
        why="a catalog is replaced by a better one only",
        next_step=f"the last good catalog stays in use; {errors.CHECK_CREDENTIALS}",
    )
