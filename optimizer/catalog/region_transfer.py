"""Prices of data that leaves one region for another (data/region_transfer.csv), kept by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from functools import cache

from optimizer.catalog.gpus import read_table
from optimizer.catalog.model import UnitPrice
from optimizer.contract.units import GIB

ITEM = "region-transfer"


def transfer_price(from_region: str, to_region: str) -> UnitPrice:
    """Return USD for a GB that leaves a region for another; of a region without a price, the highest, named as such.

    https://aws.amazon.com/ec2/pricing/on-demand/#Data_Transfer, and the same for S3: https://aws.amazon.com/s3/pricing/
    """
    item = f"{ITEM} {from_region} {to_region}"
    for price, to_regions in _table():
        if price.region == from_region and to_regions.fullmatch(to_region):
            return replace(price, item=item)
    highest = max((price for price, _ in _table()), key=lambda price: price.usd)
    bound = f"upper bound: highest of all regions ({highest.region}), no figure for {from_region}"
    return replace(highest, item=item, region=from_region, source=f"{bound}; {highest.source}")


def transfer_usd(gib: float, from_region: str | None, to_region: str) -> float:
    """Return USD for ``gib`` at the table's price; 0 within a region, or from none.

    A GB counts as 10^9 bytes, the dearer reading: AWS's pages do not say which it is.
    """
    if from_region in (None, to_region):
        return 0.0
    return gib * GIB / 1e9 * transfer_price(from_region, to_region).usd


@cache
def _table() -> list[tuple[UnitPrice, re.Pattern[str]]]:
    return read_table("region_transfer.csv", _parse)


def _parse(row: dict[str, str]) -> tuple[UnitPrice, re.Pattern[str]]:
    if not (row["from_region"] and row["to_regions"] and row["source"] and float(row["usd_per_gb"]) > 0):
        raise ValueError(row)
    price = UnitPrice(
        item=ITEM,
        region=row["from_region"],
        usd=float(row["usd_per_gb"]),
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]),
    )
    return price, re.compile(row["to_regions"])
