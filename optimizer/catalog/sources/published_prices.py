"""Prices copied by hand from AWS's public price list (data/inputs/prices.csv), for a catalog that works offline.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/price-changes.html
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import date
from typing import Any

from optimizer.catalog.sources import Skipped, UnusableRowError

NAME = "on-demand and reserved prices"
ORIGIN = "AWS public price list"


def parse(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """On-demand and one-year no-upfront reserved prices by type and region.

    Args:
        lines: CSV with instance_type, region, on_demand_usd_per_hour, reserved_1yr_no_upfront_usd_per_hour, as_of (of
            the on-demand price), reserved_as_of.

    Returns:
        Rows of instance_type, region, on_demand, reserved (USD per hour, reserved may be None), as_of and
        reserved_as_of; and the rows that are malformed, with their line.
    """
    reader = csv.DictReader(lines)
    found, skipped, seen = [], [], set()
    for row in reader:
        try:
            price = _price(row)
            key = (price["instance_type"], price["region"])
            if key in seen:
                raise UnusableRowError(f"a second price of {key[0]} in {key[1]}")
            seen.add(key)
            found.append(price)
        except (UnusableRowError, KeyError, TypeError, ValueError) as error:
            skipped.append(Skipped(source=NAME, place=f"line {reader.line_num}", reason=str(error) or repr(error)))
    return found, skipped


def _price(row: dict[str, str]) -> dict[str, Any]:
    on_demand = float(row["on_demand_usd_per_hour"])
    published = row["reserved_1yr_no_upfront_usd_per_hour"]
    reserved = float(published) if published else None
    # `not x > 0` also refuses NaN.
    if not on_demand > 0 or (reserved is not None and not reserved > 0):
        raise UnusableRowError(f"a price is above 0 USD per hour, got {on_demand} and {reserved}")
    if reserved is not None and reserved > on_demand:
        raise UnusableRowError(f"reserved {reserved} is above on demand {on_demand} USD per hour")
    if not row["instance_type"] or not row["region"]:
        raise UnusableRowError("no instance type or region")
    return {
        "instance_type": row["instance_type"],
        "region": row["region"],
        "on_demand": on_demand,
        "reserved": reserved,
        "as_of": date.fromisoformat(row["as_of"]),
        "reserved_as_of": date.fromisoformat(row["reserved_as_of"]) if reserved is not None else None,
    }
