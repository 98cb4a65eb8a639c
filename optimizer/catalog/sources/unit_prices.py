"""Prices of everything but instances, kept by hand (data/inputs/unit_prices.csv); a refresh reads price_list.py."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

from optimizer.catalog.model import UNIT_ITEMS, UnitPrice
from optimizer.catalog.sources import Skipped, UnusableRowError, parse_csv

NAME = "unit prices"


def parse(lines: Iterable[str]) -> tuple[list[UnitPrice], list[Skipped]]:
    """Unit prices by item and region from CSV, and malformed rows."""
    return parse_csv(lines, NAME, _parse_row, key="item")


def _parse_row(row: dict[str, str]) -> UnitPrice:
    usd = float(row["usd"])
    if row["item"] not in UNIT_ITEMS:
        raise UnusableRowError(f"item {row['item']!r} is none of {', '.join(UNIT_ITEMS)}")
    if not usd > 0:
        raise UnusableRowError(f"a price is above 0 USD, got {usd}")
    if not row["source"]:
        raise UnusableRowError("no source")
    return UnitPrice(
        item=row["item"],
        region=row["region"],
        usd=usd,
        source=row["source"],
        as_of=date.fromisoformat(row["as_of"]),
    )
