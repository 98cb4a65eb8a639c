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


def test_the_regions_price_is_its_lowest_zones_with_the_zones_id() -> None:
    found, skipped = spot_history.parse([_entry(), _entry("us-east-1b", "18.25")], ZONES, "us-east-1")
    assert (found, skipped) == ({"p5.48xlarge": (18.25, "use1-az1")}, [])


def test_of_one_zone_the_latest_price_counts_not_the_lowest() -> None:
    entries = [_entry(price="10", hour=1), _entry(price="22", hour=3), _entry(price="15", hour=2)]
    assert spot_history.parse(entries, ZONES, "us-east-1")[0] == {"p5.48xlarge": (22, "use1-az6")}


def test_other_systems_and_local_zones_are_left_out() -> None:
    entries = [_entry(price="1", ProductDescription="Windows"), _entry("us-east-1-bos-1a", "1"), _entry()]
    assert spot_history.parse(entries, ZONES, "us-east-1")[0] == {"p5.48xlarge": (20.5, "use1-az6")}


def test_an_answer_that_names_the_zone_id_needs_no_map() -> None:
    entry = _entry(AvailabilityZoneId="use1-az4")
    assert spot_history.parse([entry], {}, "us-east-1")[0] == {"p5.48xlarge": (20.5, "use1-az4")}


def test_a_price_of_a_zone_that_does_not_offer_the_type_cannot_be_had() -> None:
    entries = [_entry(), _entry("us-east-1b", "1")]
    offered = {"p5.48xlarge": ("use1-az6",)}
    assert spot_history.parse(entries, ZONES, "us-east-1", offered)[0] == {"p5.48xlarge": (20.5, "use1-az6")}
    assert spot_history.parse(entries, ZONES, "us-east-1", {})[0] == {}


@pytest.mark.parametrize("price", ["0", "-1", "free", "nan", "inf", None])
def test_a_price_that_is_none_is_reported(price: Any) -> None:
    found, skipped = spot_history.parse([_entry(price=price)], ZONES, "us-east-1")
    assert found == {} and "p5.48xlarge in us-east-1a" in str(skipped[0])


def test_a_zone_the_account_does_not_list_is_reported() -> None:
    found, skipped = spot_history.parse([_entry("us-east-1z")], ZONES, "us-east-1")
    assert found == {} and len(skipped) == 1
