"""On-demand and spot prices by zone (data/inputs/zone_prices.csv), as EC2 quoted them to a public catalog.

Zone ids, unlike names, are the same in every account:
https://docs.aws.amazon.com/global-infrastructure/latest/regions/az-ids.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.catalog.sources import Skipped, UnusableRowError, parse_csv, parse_price
from optimizer.catalog.sources.offerings import zone_prefix
from optimizer.contract.hardware import HourlyPrice

NAME = "prices by zone"
# catalogs/v9/aws/vms.csv of https://github.com/skypilot-org/skypilot-catalog, commit 3e9a175, Apache-2.0.
ORIGIN = "SkyPilot catalog v9"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotedPrices:
    """Prices of a type in one zone; None where the catalog has none."""

    instance_type: str
    region: str
    zone_id: str
    on_demand: HourlyPrice | None
    spot: HourlyPrice | None


def parse(lines: Iterable[str]) -> tuple[dict[tuple[str, str], list[QuotedPrices]], list[Skipped]]:
    """Prices by type and region, one record a zone, and malformed rows."""
    records, skipped = parse_csv(lines, NAME, _parse_row, key="instance_type")
    quotes: defaultdict[tuple[str, str], list[QuotedPrices]] = defaultdict(list)
    for record in records:
        quotes[record.instance_type, record.region].append(record)
    return quotes, skipped


def _parse_row(row: dict[str, str]) -> QuotedPrices:
    zone_id = row["zone_id"]
    if not zone_id.startswith(f"{zone_prefix(row['region'])}-az"):
        raise UnusableRowError(f"zone {zone_id!r} is not of {row['region']}")

    def price(usd: str, zone_id: str = "") -> HourlyPrice | None:
        return parse_price(usd, row["as_of"], ORIGIN, zone_id) if usd else None

    return QuotedPrices(
        instance_type=row["instance_type"],
        region=row["region"],
        zone_id=zone_id,
        on_demand=price(row["on_demand_usd_per_hour"]),
        spot=price(row["spot_usd_per_hour"], zone_id),
    )
