"""EC2 Spot Advisor (data/inputs/spot_advisor.csv): saving over on-demand and how often instances are interrupted.

https://aws.amazon.com/ec2/spot/instance-advisor/ : "the frequency of interruption represents the rate at which Spot
has reclaimed capacity during the trailing month"; "savings over on-demand" is the trailing month's average.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import date
from typing import Any

from optimizer.catalog.sources import Skipped, UnusableRowError
from optimizer.hardware import DERIVED_SPOT

NAME = "interruption bands"
ORIGIN = "AWS Spot Advisor"
# What offers print for a price that is on-demand x (1 - saving), not one that AWS ever charged.
PRICE_SOURCE = DERIVED_SPOT

BANDS: dict[str, tuple[float, float | None]] = {
    "<5%": (0.0, 0.05),
    "5-10%": (0.05, 0.10),
    "10-15%": (0.10, 0.15),
    "15-20%": (0.15, 0.20),
    ">20%": (0.20, None),
}


def parse(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Savings and interruption bands by type and region.

    Args:
        lines: CSV with instance_type, region, savings_over_on_demand_pct, interruption_frequency_per_month, as_of.

    Returns:
        Rows of instance_type, region, saving (fraction of the on-demand price, may be negative), low and high (share
        of instances interrupted in a month, high None for the open band) and as_of; and malformed rows.
    """
    reader = csv.DictReader(lines)
    found, skipped = [], []
    for row in reader:
        try:
            saving = float(row["savings_over_on_demand_pct"]) / 100
            band = row["interruption_frequency_per_month"]
            if band not in BANDS:
                raise UnusableRowError(f"interruption band {band!r} is none of {', '.join(BANDS)}")
            if not saving < 1:
                raise UnusableRowError(f"a saving of {saving:.0%} leaves no price")
            low, high = BANDS[band]
            found.append(
                {
                    "instance_type": row["instance_type"],
                    "region": row["region"],
                    "saving": saving,
                    "low": low,
                    "high": high,
                    "as_of": date.fromisoformat(row["as_of"]),
                }
            )
        except (UnusableRowError, KeyError, TypeError, ValueError) as error:
            skipped.append(Skipped(source=NAME, place=f"line {reader.line_num}", reason=str(error) or repr(error)))
    return found, skipped


def spot_price(on_demand_usd_per_hour: float, saving: float) -> float | None:
    """Spot price implied by a saving, USD per hour, rounded to the 4 decimals AWS quotes; None where the saving is
    negative: a spot price above on-demand is not one to plan with (it comes from comparing with an old price).
    """
    if saving < 0:
        return None
    return round(on_demand_usd_per_hour * (1 - saving), 4)
