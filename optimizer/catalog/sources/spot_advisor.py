"""EC2 Spot Advisor (data/inputs/spot_advisor.csv): saving over on-demand, and share of instances interrupted.

https://aws.amazon.com/ec2/spot/instance-advisor/ : "the frequency of interruption represents the rate at which Spot
has reclaimed capacity during the trailing month"; "savings over on-demand" is the trailing month's average.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date

from optimizer.catalog.sources import Skipped, UnusableRowError, parse_csv
from optimizer.catalog.tables import InterruptionBand
from optimizer.contract.hardware import DERIVED_SPOT, HourlyPrice

NAME = "interruption bands"
ORIGIN = "AWS Spot Advisor"

BANDS: dict[str, tuple[float, float | None]] = {
    "<5%": (0.0, 0.05),
    "5-10%": (0.05, 0.10),
    "10-15%": (0.10, 0.15),
    "15-20%": (0.15, 0.20),
    ">20%": (0.20, None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotAdvice:
    """Advice for a type in a region; ``saving`` is a fraction of the on-demand price and may be negative."""

    instance_type: str
    region: str
    saving: float
    interruptions: InterruptionBand


def parse(lines: Iterable[str]) -> tuple[list[SpotAdvice], list[Skipped]]:
    """Advice by type and region from CSV, and malformed rows."""
    return parse_csv(lines, NAME, _parse_row, key="instance_type")


def _parse_row(row: dict[str, str]) -> SpotAdvice:
    saving = float(row["savings_over_on_demand_pct"]) / 100
    band = row["interruption_frequency_per_month"]
    if band not in BANDS:
        raise UnusableRowError(f"interruption band {band!r} is none of {', '.join(BANDS)}")
    if not saving < 1:
        raise UnusableRowError(f"a saving of {saving:.0%} leaves no price")
    low, high = BANDS[band]
    return SpotAdvice(
        instance_type=row["instance_type"],
        region=row["region"],
        saving=saving,
        interruptions=InterruptionBand(low=low, high=high, source=ORIGIN, as_of=date.fromisoformat(row["as_of"])),
    )


def spot_price(on_demand: HourlyPrice, advice: SpotAdvice) -> HourlyPrice | None:
    """Spot price implied by a saving, rounded to 4 decimals as AWS quotes; None above on-demand (an old price)."""
    if advice.saving < 0:
        return None
    usd = round(on_demand.usd_per_hour * (1 - advice.saving), 4)
    return HourlyPrice(usd_per_hour=usd, source=DERIVED_SPOT, as_of=advice.interruptions.as_of)
