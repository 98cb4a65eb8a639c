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
from optimizer.catalog.sources import Skipped
from optimizer.catalog.sources.offerings import zone_prefix

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "spot prices"
PRICE_SOURCE = "spot-price-history"
PRODUCT = "Linux/UNIX"


class ZonePrice(NamedTuple):
    """Spot price of one zone, USD per hour."""

    usd: float
    zone_id: str


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


def parse(
    entries: Iterable[Mapping[str, Any]],
    zone_ids: Mapping[str, str],
    region: str,
    offered: Mapping[str, Collection[str]] | None = None,
) -> tuple[dict[str, tuple[ZonePrice, ...]], list[Skipped]]:
    """Current prices by type, the cheapest zone first, and unusable entries; the latest entry of a zone counts.

    Left out are Local Zones and, where ``offered`` tells the zones of each type, all others.
    """
    own_zone = re.compile(re.escape(zone_prefix(region)) + r"-az[0-9]+")
    latest: dict[tuple[str, str], tuple[datetime, float]] = {}
    skipped: list[Skipped] = []
    for entry in entries:
        if entry["ProductDescription"] not in (PRODUCT, f"{PRODUCT} (Amazon VPC)"):
            continue
        name, zone = entry["InstanceType"], entry["AvailabilityZone"]
        # Newer answers carry the zone's id themselves.
        zone_id = entry.get("AvailabilityZoneId") or zone_ids.get(zone)
        try:
            priced = entry["Timestamp"], float(entry["SpotPrice"])
            if not 0 < priced[1] < float("inf"):
                raise ValueError(f"a price is above 0 USD per hour, got {priced[1]}")
            if not zone_id:
                raise ValueError(f"zone {zone} is unknown")
        except (TypeError, ValueError) as error:
            skipped.append(Skipped(source=NAME, place=f"{name} in {zone}", reason=str(error)))
            continue
        if own_zone.fullmatch(zone_id) and (offered is None or zone_id in offered.get(name, ())):
            latest[name, zone_id] = max(latest.get((name, zone_id), priced), priced)
    by_type: defaultdict[str, list[ZonePrice]] = defaultdict(list)
    for (name, zone_id), (_, usd) in latest.items():
        by_type[name].append(ZonePrice(usd, zone_id))
    return {name: tuple(sorted(prices)) for name, prices in by_type.items()}, skipped
