"""Rows of the files kept by hand: a malformed one is skipped with its line, the others come through."""

from __future__ import annotations

from datetime import date

import pytest

from optimizer.catalog.sources import published_prices, spot_advisor, unit_prices, zone_prices
from optimizer.contract.hardware import HourlyPrice

PRICES = "instance_type,region,on_demand_usd_per_hour,reserved_1yr_no_upfront_usd_per_hour,as_of,reserved_as_of"
ADVISOR = "instance_type,region,savings_over_on_demand_pct,interruption_frequency_per_month,as_of"
SPOT_POOL = ("p5.48xlarge", "us-east-1")
UNITS = "item,region,usd,source,as_of"


def price(usd: float, as_of: str) -> HourlyPrice:
    return HourlyPrice(usd_per_hour=usd, source="AWS public price list", as_of=date.fromisoformat(as_of))


def test_prices() -> None:
    rows, skipped = published_prices.parse(
        [PRICES, "p5.48xlarge,us-east-1,55.04,,2026-07-20,", "g5.xlarge,eu-west-1,1.1,0.7,2026-01-21,2026-01-20"]
    )
    assert skipped == []
    assert [(row.instance_type, row.region, row.on_demand, row.reserved_1yr) for row in rows] == [
        ("p5.48xlarge", "us-east-1", price(55.04, "2026-07-20"), None),
        ("g5.xlarge", "eu-west-1", price(1.1, "2026-01-21"), price(0.7, "2026-01-20")),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("g5.xlarge,eu-west-1,0,,2026-01-21,", "above 0 USD"),
        ("g5.xlarge,eu-west-1,-1,,2026-01-21,", "above 0 USD"),
        ("g5.xlarge,eu-west-1,nan,,2026-01-21,", "above 0 USD"),
        ("g5.xlarge,eu-west-1,1,0,2026-01-21,2026-01-21", "above 0 USD"),
        ("g5.xlarge,eu-west-1,1,2,2026-01-21,2026-01-21", "reserved 2.0 is above on demand 1.0"),
        ("g5.xlarge,eu-west-1,one,,2026-01-21,", "could not convert"),
        ("g5.xlarge,eu-west-1,1,,yesterday,", "isoformat"),
        ("g5.xlarge,eu-west-1,1,0.5,2026-01-21,", "isoformat"),
        ("g5.xlarge,eu-west-1", ""),
        (",eu-west-1,1,,2026-01-21,", "no instance type"),
        ("p5.48xlarge,us-east-1,9,,2026-01-21,", "a second price of p5.48xlarge in us-east-1"),
    ],
)
def test_a_bad_price_row_is_skipped_with_its_line(line: str, reason: str) -> None:
    rows, skipped = published_prices.parse([PRICES, "p5.48xlarge,us-east-1,55.04,,2026-07-20,", line])
    assert [row.on_demand.usd_per_hour for row in rows] == [55.04]
    assert skipped[0].place == "line 3" and reason in skipped[0].reason


@pytest.mark.parametrize(
    ("band", "low", "high"), [("<5%", 0, 0.05), ("5-10%", 0.05, 0.1), ("15-20%", 0.15, 0.2), (">20%", 0.2, None)]
)
def test_advisor_bands_are_shares_of_instances(band: str, low: float, high: float | None) -> None:
    ((row,), skipped) = spot_advisor.parse([ADVISOR, f"p5.48xlarge,us-east-1,52,{band},2025-07-28"])
    assert skipped == []
    assert (row.saving, row.interruptions.low, row.interruptions.high) == (0.52, low, high)


@pytest.mark.parametrize("line", ["a,b,52,often,2025-07-28", "a,b,100,<5%,2025-07-28", "a,b,x,<5%,2025-07-28", "a,b"])
def test_a_bad_advisor_row_is_skipped_with_its_line(line: str) -> None:
    rows, skipped = spot_advisor.parse([ADVISOR, line])
    assert rows == [] and skipped[0].place == "line 2"


@pytest.mark.parametrize(("saving_pct", "usd"), [(52, 26.4192), (0, 55.04), (-62, None)])
def test_a_spot_price_is_on_demand_less_the_saving_and_none_above_on_demand(saving_pct: int, usd: float | None) -> None:
    ((advice,), _) = spot_advisor.parse([ADVISOR, f"p5.48xlarge,us-east-1,{saving_pct},<5%,2025-07-28"])
    spot = spot_advisor.spot_price(price(55.04, "2026-07-20"), advice)
    assert (spot.usd_per_hour if spot else None) == usd
    assert not spot or (spot.source, spot.as_of) == ("advisor-derived", date(2025, 7, 28))


def test_unit_prices() -> None:
    lines = [
        UNITS,
        "gp3-storage,us-east-1,0.08,list,2026-07-01",
        "gp3-storage,us-east-1,0.09,list,2026-07-01",
        "gp9,us-east-1,0.08,list,2026-07-01",
        "gp3-iops,us-east-1,0,list,2026-07-01",
        "gp3-iops,us-east-1,0.005,,2026-07-01",
        "gp3-iops",
    ]
    rows, skipped = unit_prices.parse(lines)
    assert [(row.item, row.usd) for row in rows] == [("gp3-storage", 0.08)]
    assert [line.place for line in skipped] == [f"line {n}" for n in range(3, 8)]


def test_prices_by_zone() -> None:
    lines = [
        "instance_type,region,zone_id,on_demand_usd_per_hour,spot_usd_per_hour,as_of",
        "p5.48xlarge,us-east-1,use1-az6,55.04,17.25,2026-07-09",
        "p5.48xlarge,us-east-1,use1-az1,55.04,,2026-07-09",
        "p5.48xlarge,us-east-1,use1-az6,55.04,18,2026-07-09",
        "p5.48xlarge,us-east-1,usw2-az1,55.04,18,2026-07-09",
        "p5.48xlarge,us-east-1,use1-az2,55.04,-1,2026-07-09",
    ]
    quotes, skipped = zone_prices.parse(lines)
    assert [quote.spot and (quote.spot.zone_id, quote.spot.usd_per_hour) for quote in quotes[SPOT_POOL]] == [
        ("use1-az6", 17.25),
        None,
    ]
    assert [line.place for line in skipped] == ["line 4", "line 5", "line 6"]
