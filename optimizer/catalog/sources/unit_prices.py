"""Prices of everything besides instances: data/inputs/unit_prices.csv, and Pricing GetProducts on refresh."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import date
from typing import Any

from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.sources import Skipped, UnusableRowError

NAME = "unit prices"


def parse(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Unit prices by item and region.

    Args:
        lines: CSV with item, region, usd, source, as_of.

    Returns:
        Rows of the unit_prices table, and malformed rows with their line.
    """
    reader = csv.DictReader(lines)
    found, skipped, seen = [], [], set()
    for row in reader:
        try:
            usd = float(row["usd"])
            key = (row["item"], row["region"])
            if row["item"] not in UNIT_ITEMS:
                raise UnusableRowError(f"item {row['item']!r} is none of {', '.join(UNIT_ITEMS)}")
            if not usd > 0:
                raise UnusableRowError(f"a price is above 0 USD, got {usd}")
            if not row["source"] or not row["region"]:
                raise UnusableRowError("no source or region")
            if key in seen:
                raise UnusableRowError(f"a second price of {key[0]} in {key[1]}")
            seen.add(key)
            found.append(
                {
                    "item": row["item"],
                    "region": row["region"],
                    "usd": usd,
                    "source": row["source"],
                    "as_of": date.fromisoformat(row["as_of"]),
                }
            )
        except (UnusableRowError, KeyError, TypeError, ValueError) as error:
            skipped.append(Skipped(source=NAME, place=f"line {reader.line_num}", reason=str(error) or repr(error)))
    return found, skipped
