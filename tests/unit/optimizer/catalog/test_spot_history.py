from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from optimizer.catalog.sources import spot_history

ZONES = {"us-east-1a": "use1-az6", "us-east-1b": "use1-az1", "us-east-1-bos-1a": "use1-bos1-az1"}


def _entry(zone: str = "us-east-1a", price: str = "20.5", hour: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": zone,
        "SpotPrice": price,
        "ProductDescription": "Linux/UNIX",
        "Timestamp": datetime(2026, 11, 21, hour, tzinfo=UTC),
        **changes,
    }


def test_every_zone_has_its_price_the_cheapest_first() -> None:
    found, skipped = spot_history.parse([_entry(), _entry("us-east-1b", "18.25")], ZONES)
    assert (found, skipped) == ({"p5.48xlarge": ((18.25, "use1-az1"), (20.5, "use1-az6"))}, [])


@pytest.mark.parametrize(
    ("entries", "price"),
    [
        # The latest price of a zone, not the lowest.
        ([_entry(price="10", hour=1), _entry(price="22", hour=3), _entry(price="15", hour=2)], (22, "use1-az6")),
        # Other systems and Local Zones are left out.
        (
            [_entry(price="1", ProductDescription="Windows"), _entry("us-east-1-bos-1a", "1"), _entry()],
            (20.5, "use1-az6"),
        ),
        # An answer that names the zone's id needs no map.
        ([_entry("us-east-1z", AvailabilityZoneId="use1-az4")], (20.5, "use1-az4")),
    ],
)
def test_entries_that_count(entries: list[dict[str, Any]], price: tuple[float, str]) -> None:
    assert spot_history.parse(entries, ZONES)[0] == {"p5.48xlarge": (price,)}


def test_a_price_of_a_zone_that_does_not_offer_the_type_cannot_be_had() -> None:
    entries = [_entry(), _entry("us-east-1b", "1")]
    offered = {"p5.48xlarge": ("use1-az6",)}
    assert spot_history.parse(entries, ZONES, offered)[0] == {"p5.48xlarge": ((20.5, "use1-az6"),)}
    assert spot_history.parse(entries, ZONES, {})[0] == {}


@pytest.mark.parametrize(
    ("zone", "price"),
    [*(("us-east-1a", price) for price in ("0", "-1", "free", "nan", "inf", None)), ("us-east-1z", "20.5")],
)
def test_an_unusable_price_and_an_unlisted_zone_are_reported(zone: str, price: Any) -> None:
    prices, (skipped,) = spot_history.parse([_entry(zone, price)], ZONES)
    assert prices == {} and f"p5.48xlarge in {zone}" in str(skipped)
