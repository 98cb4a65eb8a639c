"""EC2 DescribeSpotPriceHistory: current spot prices by zone.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from optimizer.aws.paging import pages
from optimizer.catalog.sources import Skipped, UnusableRowError
from optimizer.contract.spelling import ZONE_ID

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "spot prices"
PRICE_SOURCE = "spot-price-history"
PRODUCT = "Linux/UNIX"


class ZonePrice(NamedTuple):
    """Spot price of one zone, USD per hour."""

    usd: float
    zone_id: str


class Entry(NamedTuple):
    """One entry of a history: the price of a type in a zone from a moment on; ``zone_id`` may be empty."""

    instance_type: str
    zone_name: str
    zone_id: str
    at: datetime
    usd: float


def fetch(client: EC2Client, types: Collection[str]) -> list[dict[str, Any]]:
    """Prices in force now of ``types``, in every zone of the client's region."""
    # A start of "now" gives, for each zone, the one entry that is in force.
    asked = {"InstanceTypes": sorted(types), "ProductDescriptions": [PRODUCT], "StartTime": datetime.now(UTC)}
    return list(pages(client, "describe_spot_price_history", "SpotPriceHistory", **asked))


def fetch_zone_ids(client: EC2Client) -> dict[str, str]:
    """Zone id by zone name: names ("us-east-1a") can differ between accounts, ids do not.

    https://docs.aws.amazon.com/global-infrastructure/latest/regions/az-ids.html
    """
    zones = client.describe_availability_zones()["AvailabilityZones"]
    return {zone["ZoneName"]: zone["ZoneId"] for zone in zones}


def parse_entry(entry: Mapping[str, Any]) -> Entry | None:
    """Parse an entry of the API or of the AWS CLI's JSON; None for another product, UnusableRowError if malformed."""
    try:
        if entry["ProductDescription"] not in (PRODUCT, f"{PRODUCT} (Amazon VPC)"):
            return None
        usd, at = float(entry["SpotPrice"]), entry["Timestamp"]
        at = datetime.fromisoformat(at) if isinstance(at, str) else at
        if at.tzinfo is None:
            raise ValueError(f"the time {at} has no zone")
        # Newer answers carry the zone's id themselves.
        zone_id = entry.get("AvailabilityZoneId") or ""
        found = Entry(str(entry["InstanceType"]), str(entry["AvailabilityZone"]), zone_id, at.astimezone(UTC), usd)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnusableRowError(f"malformed entry: {error!r}") from error
    if not 0 < usd < float("inf"):
        raise UnusableRowError(f"a price is above 0 USD per hour, got {usd}")
    return found


def parse(
    entries: Iterable[Mapping[str, Any]],
    zone_ids: Mapping[str, str],
    offered: Mapping[str, Collection[str]] | None = None,
) -> tuple[dict[str, tuple[ZonePrice, ...]], list[Skipped]]:
    """Current prices by type, the cheapest zone first, and unusable entries; the latest entry of a zone counts.

    Left out are Local Zones and, where ``offered`` tells the zones of each type, all others.
    """
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    skipped: list[Skipped] = []
    for entry in entries:
        try:
            found = parse_entry(entry)
            zone_id = found and (found.zone_id or zone_ids[found.zone_name])
        except (UnusableRowError, KeyError) as error:
            place = f"{entry.get('InstanceType')} in {entry.get('AvailabilityZone')}"
            reason = f"zone {error} is unknown" if isinstance(error, KeyError) else str(error)
            skipped.append(Skipped(source=NAME, place=place, reason=reason))
            continue
        if found is None or zone_id is None:
            continue
        name, priced = found.instance_type, (found.at, found.usd)
        if re.match(ZONE_ID, zone_id) and (offered is None or zone_id in offered.get(name, ())):
            latest[name, zone_id] = max(latest.get((name, zone_id), priced), priced)
    by_type: defaultdict[str, list[ZonePrice]] = defaultdict(list)
    for (name, zone_id), (_, usd) in latest.items():
        by_type[name].append(ZonePrice(usd, zone_id))
    return {name: tuple(sorted(prices)) for name, prices in by_type.items()}, skipped
