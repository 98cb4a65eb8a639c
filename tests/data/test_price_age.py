"""The spread of old spot prices is the one that the committed inputs show."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from datetime import date
from pathlib import Path

import pytest

from optimizer.catalog.gpus import DATA
from optimizer.economics import price_age


def _shares() -> dict[str, list[tuple[float, float]]]:
    """Pairs of old and new share of on-demand by region, the cheapest zone of each pool."""
    inputs = {}
    for name in ("zone_prices", "spot_advisor"):
        with (DATA / "inputs" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            inputs[name] = list(csv.DictReader(file))
    new: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in inputs["zone_prices"]:
        if row["spot_usd_per_hour"] and row["on_demand_usd_per_hour"]:
            share = float(row["spot_usd_per_hour"]) / float(row["on_demand_usd_per_hour"])
            new[row["instance_type"], row["region"]].append(share)
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in inputs["spot_advisor"]:
        pool, old = (row["instance_type"], row["region"]), 1 - float(row["savings_over_on_demand_pct"]) / 100
        if pool in new and old <= 1:
            pairs[row["region"]].append((old, min(new[pool])))
    return pairs


def _covered(pairs: list[tuple[float, float]]) -> float:
    days = price_age._MEASURED_DAYS
    return sum(new <= price_age.p95_usd_per_hour("g5.xlarge", [old], 1.0, days) + 1e-9 for old, new in pairs) / len(
        pairs
    )


def test_the_constants_are_the_regression_of_the_inputs() -> None:
    pairs = [pair for region in _shares().values() for pair in region]
    old, new = [math.log(a) for a, _ in pairs], [math.log(b) for _, b in pairs]
    slope, intercept = statistics.linear_regression(old, new)
    residuals = [b - intercept - slope * a for a, b in zip(old, new, strict=True)]
    assert len(pairs) == 435 and price_age._MEASURED_DAYS == 346
    assert slope == pytest.approx(price_age._KEPT, abs=5e-4)
    assert math.exp(intercept / (1 - slope)) == pytest.approx(price_age._USUAL_SHARE, abs=1e-3)
    assert statistics.pstdev(residuals) == pytest.approx(price_age._LOG_ERROR, abs=5e-4)


def test_the_95th_percentile_holds_for_low_and_high_prices() -> None:
    pairs = [pair for region in _shares().values() for pair in region]
    assert 0.93 <= _covered(pairs) <= 0.98
    assert _covered([pair for pair in pairs if pair[0] < 0.2]) >= 0.85


@pytest.mark.parametrize("instance_type", ["g5.xlarge", "p5.48xlarge"])
def test_the_spread_grows_with_age_and_ends_at_on_demand(instance_type: str) -> None:
    p95 = [price_age.p95_usd_per_hour(instance_type, [10.0], 50.0, days) for days in (0, 2, 12, 30, 136, 346, 3000)]
    assert p95[0] == 10 and p95 == sorted(p95) and p95[1] > 10 and p95[-1] < 50
    assert price_age.p95_usd_per_hour(instance_type, [49.0], 50.0, 100) == 50
    assert price_age.p95_usd_per_hour(instance_type, [20.0], None, 136) > 20


def test_the_cheapest_zone_of_a_scarce_type_is_the_likeliest_to_rise() -> None:
    alone = price_age.p95_usd_per_hour("p5.48xlarge", [10.0], 99.0, 30)
    assert price_age.p95_usd_per_hour("p5.48xlarge", [10.0, 10.0, 15.0, 20.0], 99.0, 30) == pytest.approx(1.5 * alone)
    dearest = price_age.p95_usd_per_hour("p5.48xlarge", [20.0, 10.0, 15.0, 20.0], 99.0, 30)
    assert dearest == pytest.approx(1.5 * alone)


def _quotes(use: str) -> list[dict[str, str]]:
    with (Path(price_age.__file__).parent / "data" / "spot_quotes.csv").open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["use"] == use]


def test_the_spread_of_scarce_types_is_that_of_the_quotes_it_was_fitted_to() -> None:
    logs = [math.log(float(row["new_usd"]) / float(row["old_median_usd"])) for row in _quotes("fit")]
    assert math.hypot(*logs) / math.sqrt(len(logs)) == pytest.approx(price_age._SCARCE_LOG_ERROR, abs=5e-4)
    assert all(row["source"] for row in _quotes("fit"))


def test_of_the_quotes_left_out_all_but_the_lone_zone_at_on_demand_lie_under_the_95th_percentile() -> None:
    quotes, under = _quotes("judge"), 0
    for row in quotes:
        days = (date.fromisoformat(row["new_as_of"]) - date.fromisoformat(row["old_as_of"])).days
        old, median = float(row["old_usd"]), float(row["old_median_usd"])
        under += float(row["new_usd"]) <= price_age.p95_usd_per_hour(row["instance_type"], [old, median], None, days)
    assert (under, len(quotes)) == (15, 16)
