"""Prices of data that leaves one region for another (data/region_transfer.csv), kept by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any

from optimizer.catalog.gpus import read_table
from optimizer.contract.units import GIB

ITEM = "region-transfer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPrice:
    """USD for a GB that leaves ``from_region`` for ``to_region``; what comes into a region costs nothing.

    https://aws.amazon.com/ec2/pricing/on-demand/#Data_Transfer, and the same for S3: https://aws.amazon.com/s3/pricing/
    """

    from_region: str
    to_region: str
    usd_per_gb: float
    source: str
    as_of: date

    @property
    def item(self) -> str:
        """Name of the price in a plan: "region-transfer us-east-1 eu-west-1"."""
        return f"{ITEM} {self.from_region} {self.to_region}"


def transfer_price(from_region: str, to_region: str) -> TransferPrice:
    """Return the price between two different regions; of a region without one, the highest known, named as such."""
    pair: dict[str, Any] = {"from_region": from_region, "to_region": to_region}
    for price, to_regions in _table():
        if price.from_region == from_region and to_regions.fullmatch(to_region):
            return replace(price, **pair)
    highest = max((price for price, _ in _table()), key=lambda price: price.usd_per_gb)
    bound = f"upper bound: highest of all regions ({highest.from_region}), no figure for {from_region}"
    return replace(highest, **pair, source=f"{bound}; {highest.source}")


def transfer_usd(gib: float, from_region: str | None, to_region: str) -> float:
    """Return USD for ``gib`` at the table's price; 0 within a region, or from none.

    A GB counts as 10^9 bytes, the dearer reading: AWS's pages do not say which it is.
    """
    if from_region in (None, to_region):
        return 0.0
    return gib * GIB / 1e9 * transfer_price(from_region, to_region).usd_per_gb


@cache
def _table() -> list[tuple[TransferPrice, re.Pattern[str]]]:
    return read_table("region_transfer.csv", _parse)


def _parse(row: dict[str, str]) -> tuple[TransferPrice, re.Pattern[str]]:
    if not (row["from_region"] and row["to_regions"] and row["source"] and float(row["usd_per_gb"]) > 0):
        raise ValueError(row)
    price = TransferPrice(
        from_region=row["from_region"],
        to_region="",
        usd_per_gb=float(row["usd_per_gb"]),
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]),
    )
    return price, re.compile(row["to_regions"])
