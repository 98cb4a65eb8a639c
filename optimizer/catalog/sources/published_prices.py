"""Prices copied by hand from AWS's public price list (data/inputs/prices.csv), for a catalog that works offline.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.catalog.sources import Skipped, UnusableRowError, parse_csv, parse_price
from optimizer.contract.hardware import HourlyPrice

NAME = "on-demand and reserved prices"
ORIGIN = "AWS public price list"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPrice:
    """On-demand and one-year no-upfront reserved price of a type in a region."""

    instance_type: str
    region: str
    on_demand: HourlyPrice
    reserved_1yr: HourlyPrice | None


def parse(lines: Iterable[str]) -> tuple[list[PublishedPrice], list[Skipped]]:
    """Prices by type and region from CSV, and malformed rows; ``as_of`` is of the on-demand price."""
    return parse_csv(lines, NAME, _parse_row, key="instance_type")


def _parse_row(row: dict[str, str]) -> PublishedPrice:
    on_demand = parse_price(row["on_demand_usd_per_hour"], row["as_of"], ORIGIN)
    published = row["reserved_1yr_no_upfront_usd_per_hour"]
    reserved = parse_price(published, row["reserved_as_of"], ORIGIN) if published else None
    if reserved and reserved.usd_per_hour > on_demand.usd_per_hour:
        raise UnusableRowError(
            f"reserved {reserved.usd_per_hour} is above on demand {on_demand.usd_per_hour} USD per hour"
        )
    return PublishedPrice(
        instance_type=row["instance_type"], region=row["region"], on_demand=on_demand, reserved_1yr=reserved
    )
