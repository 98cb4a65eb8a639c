"""Bring a catalog up to date from AWS: region by region, source by source, losing nothing that was good.

A source that fails, or answers with nothing usable, keeps its last good data in that region and says so; what is
neither in the answer nor wrong (a type AWS no longer lists) goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optimizer.aws import clients, errors
from optimizer.catalog import invariants, snapshot
from optimizer.catalog.model import UNIT_ITEMS, UnitItem
from optimizer.catalog.snapshot import Rows
from optimizer.catalog.sources import Skipped, instance_types, offerings, price_list, spot_history
from optimizer.catalog.sources.price_list import InstancePrice
from optimizer.errors import GpufleetError
from optimizer.hardware import InstanceType

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_pricing import PricingClient

# EC2's describe calls are throttled by account and region, the price list by account: a few regions at once are well
# below both (https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html).
REGIONS_AT_ONCE = 6

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A source that could not be read in a region, and why; its last good data stays."""

    source: str
    region: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source} in {self.region}: {self.reason}; the last good data stays"


@dataclass(kw_only=True)
class RegionAnswer:
    """What one region's sources answered; None where a source failed."""

    region: str
    types: dict[str, InstanceType] | None = None
    zones: dict[str, tuple[str, ...]] | None = None
    prices: dict[str, InstancePrice] | None = None
    spot: dict[str, tuple[float, str]] | None = None
    units: dict[UnitItem, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def read(self) -> bool:
        """Whether any source answered."""
        return any(answer is not None for answer in (self.types, self.zones, self.prices, self.spot)) or bool(
            self.units
        )


@dataclass(frozen=True, kw_only=True)
class RefreshResult:
    """What a refresh did.

    Attributes:
        directory: where the catalog was written.
        answers: what each region answered.
        dropped: prices left out because they contradicted another.
    """

    directory: Path
    answers: tuple[RegionAnswer, ...]
    dropped: tuple[str, ...]


def enabled_regions() -> tuple[str, ...]:
    """Regions the account can use.

    Raises:
        GpufleetError: AWS could not be asked.
    """
    try:
        answer = clients.ec2(clients.HOME_REGION).describe_regions()
    except Exception as error:
        if not errors.is_aws_error(error):
            raise
        raise _nothing_refreshed([errors.reason(error)]) from error
    return tuple(sorted(region["RegionName"] for region in answer["Regions"]))


def refresh(
    regions: Sequence[str], *, directory: Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> RefreshResult:
    """Read ``regions`` and write the catalog they make together with what is known of the others.

    Args:
        regions: the regions to read.
        directory: where to write; the user's catalog by default.
        progress: called with a line when a region is done.

    Raises:
        GpufleetError: no source of any region could be read, or the result would break an invariant; nothing is
            written then.
        DataMissingError: the catalog to start from cannot be read.
    """
    target = directory or snapshot.user_directory()
    base = snapshot.newest()
    rows = {name: [dict(row) for row in table] for name, table in base.rows.items()}
    now = datetime.now(UTC)
    known = {row["name"] for row in rows["instance_types"]}
    known_regions = {row["region"] for row in rows["offers"]}

    def read(region: str) -> RegionAnswer:
        answer = read_region(region, known, now.date(), may_be_empty=region not in known_regions)
        progress(f"{region}: {'read' if answer.read() else 'failed'}")
        return answer

    with ThreadPoolExecutor(max_workers=REGIONS_AT_ONCE) as pool:
        answers = tuple(pool.map(read, regions))
    if not any(answer.read() for answer in answers):
        raise _nothing_refreshed([failure.reason for answer in answers for failure in answer.failures])
    for answer in answers:
        merge(rows, answer, now.date())
    dropped = drop_contradictions(rows)
    catalog = snapshot.to_catalog(rows, now, origin="the refreshed catalog")
    invariants.require_sound(invariants.check(catalog), "catalog", why="money is spent by it")
    snapshot.write_rows(target, rows, made_at=now)
    return RefreshResult(directory=target, answers=answers, dropped=tuple(dropped))


def read_region(region: str, known: set[str], today: date, *, may_be_empty: bool) -> RegionAnswer:
    """Ask every source of one region; each fails alone.

    Args:
        region: the region.
        known: instance types the catalog already has.
        today: stamped on what is read.
        may_be_empty: whether an empty answer is believed: a region may have no GPU, but one that had GPUs and
            answers with none is a failure, not news.
    """
    answer = RegionAnswer(region=region)
    # Why a service is not asked again: each call to one that cannot answer would wait out all its retries.
    down: dict[str, str] = {}

    def attempt(service: str, source: str, call: Callable[[], T]) -> T | None:
        if service in down:
            answer.failures.append(Failure(source=source, region=region, reason=down[service]))
            return None
        try:
            result = call()
        except Exception as error:
            if not errors.is_aws_error(error):
                raise
            reason = errors.reason(error)
            answer.failures.append(Failure(source=source, region=region, reason=reason))
            if _concerns_the_service(service, error):
                down[service] = reason
            return None
        if not result:
            if may_be_empty:
                return None
            answer.failures.append(Failure(source=source, region=region, reason="AWS answered with nothing usable"))
            return None
        return result

    ec2 = attempt("ec2", "connection", lambda: clients.ec2(region))
    pricing = attempt("pricing", "connection", clients.pricing)
    if ec2 is None or pricing is None:
        return answer
    answer.types = attempt("ec2", instance_types.NAME, lambda: _types(ec2, answer, today))
    types = known | set(answer.types or ())
    answer.zones = attempt("ec2", offerings.NAME, lambda: _zones(ec2, region, types))
    answer.prices = attempt("pricing", price_list.NAME, lambda: _prices(pricing, answer, types))
    offered = set(answer.zones or answer.types or ())
    if offered:
        answer.spot = attempt("ec2", spot_history.NAME, lambda: _spot(ec2, answer, offered))
    for item in UNIT_ITEMS:
        usd = attempt("pricing", f"price of {item}", lambda item=item: _unit(pricing, answer, item))  # type: ignore[misc]
        if usd is not None:
            answer.units[item] = usd
    return answer


def _concerns_the_service(service: str, error: Exception) -> bool:
    """Whether every other call to the service would fail alike. All of pricing's are one action, GetProducts."""
    return (
        errors.has_no_credentials(error)
        or errors.has_bad_credentials(error)
        or errors.is_region_disabled(error)
        or errors.is_unreachable(error)
        or errors.is_server_fault(error)
        or (service == "pricing" and errors.is_not_permitted(error))
    )


def _types(ec2: EC2Client, answer: RegionAnswer, today: date) -> dict[str, InstanceType]:
    found, skipped = instance_types.parse(instance_types.fetch(ec2), source=instance_types.ORIGIN, as_of=today)
    answer.skipped += skipped
    return found


def _zones(ec2: EC2Client, region: str, types: set[str]) -> dict[str, tuple[str, ...]]:
    return offerings.parse(offerings.fetch(ec2, types), region)


def _prices(pricing: PricingClient, answer: RegionAnswer, types: set[str]) -> dict[str, InstancePrice]:
    documents = price_list.fetch_instances(pricing, answer.region)
    found, skipped = price_list.parse_instances(documents, answer.region, types)
    answer.skipped += skipped
    return found


def _spot(ec2: EC2Client, answer: RegionAnswer, types: set[str]) -> dict[str, tuple[float, str]]:
    entries, zone_ids = spot_history.fetch(ec2, types), spot_history.fetch_zone_ids(ec2)
    found, skipped = spot_history.parse(entries, zone_ids, answer.region, answer.zones)
    answer.skipped += skipped
    return found


def _unit(pricing: PricingClient, answer: RegionAnswer, item: UnitItem) -> float | None:
    usd, skipped = price_list.parse_unit(price_list.fetch_unit(pricing, item, answer.region), item, answer.region)
    answer.skipped += skipped
    return usd


def merge(rows: Rows, answer: RegionAnswer, today: date) -> None:
    """Put one region's answers into ``rows``; what a failed source gave before stays as it is."""
    types = {row["name"]: row for row in rows["instance_types"]}
    types.update({name: snapshot.type_row(instance) for name, instance in (answer.types or {}).items()})
    rows["instance_types"] = list(types.values())

    own = {row["instance_type"]: row for row in rows["offers"] if row["region"] == answer.region}
    for source in (answer.zones, answer.prices, answer.spot):
        for name in source or ():
            if name in types and name not in own:
                own[name] = snapshot.offer_row(name, answer.region)
    for name, row in own.items():
        if answer.zones is not None:
            zones = answer.zones.get(name)
            _set(row, "zone_ids", " ".join(zones) if zones else None, offerings.ORIGIN, today)
        if answer.prices is not None:
            price = answer.prices.get(name)
            _set_price(row, "on_demand", price.on_demand if price else None, price_list.ORIGIN, today)
            _set_price(row, "reserved_1yr", price.reserved_1yr if price else None, price_list.ORIGIN, today)
        if answer.spot is not None:
            usd, zone_id = answer.spot.get(name, (None, None))
            _set_price(row, "spot", usd, spot_history.PRICE_SOURCE, today)
            row["spot_zone_id"] = zone_id
    alive = [row for row in own.values() if row["zone_ids"] or row["on_demand_usd_per_hour"] is not None]
    rows["offers"] = [row for row in rows["offers"] if row["region"] != answer.region] + alive

    rows["unit_prices"] = [
        row for row in rows["unit_prices"] if row["region"] != answer.region or row["item"] not in answer.units
    ] + [
        {"item": item, "region": answer.region, "usd": usd, "source": price_list.ORIGIN, "as_of": today}
        for item, usd in answer.units.items()
    ]


def drop_contradictions(rows: Rows) -> list[str]:
    """Take out prices that contradict others, because one of the two is of another day. Says what was dropped.

    Spot and reserved prices above on-demand go, and a spot price of a zone that does not offer the type.
    """
    dropped = []
    for row in rows["offers"]:
        on_demand, zones = row["on_demand_usd_per_hour"], (row["zone_ids"] or "").split()
        for kind in ("spot", "reserved_1yr"):
            usd = row[f"{kind}_usd_per_hour"]
            if usd is None:
                continue
            if on_demand is not None and usd > on_demand:
                why = f"is above on-demand {on_demand} ({row['on_demand_as_of']})"
            elif kind == "spot" and row["spot_zone_id"] and row["spot_zone_id"] not in zones:
                why = f"is of zone {row['spot_zone_id']}, which does not offer the type ({row['zone_ids_as_of']})"
            else:
                continue
            dropped.append(
                f"{kind} price of {row['instance_type']} in {row['region']}: {usd} USD per hour "
                f"({row[f'{kind}_source']}, {row[f'{kind}_as_of']}) {why}, left out"
            )
            _set_price(row, kind, None, "", date.min)
            if kind == "spot":
                row["spot_zone_id"] = None
    return dropped


def _set_price(row: dict[str, Any], kind: str, usd: float | None, source: str, today: date) -> None:
    row[f"{kind}_usd_per_hour"] = usd
    row[f"{kind}_source"] = source if usd is not None else None
    row[f"{kind}_as_of"] = today if usd is not None else None


def _set(row: dict[str, Any], column: str, value: str | None, source: str, today: date) -> None:
    row[column] = value
    row[f"{column}_source"] = source if value is not None else None
    row[f"{column}_as_of"] = today if value is not None else None


def _nothing_refreshed(reasons: Sequence[str]) -> GpufleetError:
    unique = list(dict.fromkeys(reasons))
    return GpufleetError(
        "nothing could be read from AWS: " + "; ".join(unique[:5]),
        limit="at least one source of one region answers",
        why="a catalog is replaced by a better one only",
        next_step="the last good catalog stays in use; `aws sts get-caller-identity` shows whether credentials work",
    )
