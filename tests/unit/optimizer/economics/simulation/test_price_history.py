"""Price histories: reading AWS's JSON, prices of ticks, and what policies make of prices that change."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.price_history import assume_capacity, read_histories, usd_by_tick
from optimizer.economics.simulation.replay import PolicyFigures, replay
from optimizer.economics.simulation.simulator import SimulatedJob, simulate
from optimizer.economics.simulation.traces import CapacityTrace

START = datetime(2026, 11, 1, tzinfo=UTC)


def entry(zone: str, hour: float, usd: Any, **changes: Any) -> dict[str, Any]:
    """An entry as the AWS CLI prints it."""
    return {
        "AvailabilityZone": f"us-east-1{zone}",
        "InstanceType": "p5.48xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": str(usd),
        "Timestamp": f"{START + timedelta(hours=hour):%Y-%m-%dT%H:%M:%S}+00:00",
    } | changes


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"SpotPriceHistory": entries}, indent=4))
    return path


def trace(name: str, hours: int, begin: datetime | None = START) -> CapacityTrace:
    return CapacityTrace(name=name, gap_s=3600.0, nodes=np.ones(hours, dtype=np.int64), start_time=begin)


def test_a_tick_has_the_price_in_force_whatever_the_order_of_the_entries(tmp_path: Path) -> None:
    # AWS prints the newest first.
    first = write(tmp_path / "a.json", entry("a", 2, 30), entry("a", 0, 20), entry("b", 0.5, 18), entry("b", -5, 10))
    second = write(tmp_path / "b.json", entry("c", -1, 25, AvailabilityZoneId="use1-az4"), entry("c", 4, 26))
    history = read_histories([first, second])
    assert [zone.zone_name for zone in history.zones] == ["us-east-1a", "us-east-1b", "us-east-1c"]
    traces = [trace("pool-us-east-1a.json", 4), trace("us-east-1b_p5.json", 4), trace("use1-az4.json", 4)]
    assert usd_by_tick(history, traces).tolist() == [[20, 20, 30, 30], [10, 18, 18, 18], [25, 25, 25, 25]]
    assumed, left_out = assume_capacity(history, nodes=3)
    # From the hour when all zones have a price, 0, to the newest entry, 4.
    assert {(len(one.nodes), one.start_time, int(one.nodes.min())) for one in assumed} == {(24, START, 3)}
    assert not left_out


def test_an_old_or_short_zone_is_left_out_by_name(tmp_path: Path) -> None:
    """A price of 80 days ago counted as capacity throughout, and a zone of two hours cut the time of all to two."""
    days = [entry("a", 24 * day, 20) for day in range(90)]
    path = write(
        tmp_path / "h.json", *days, entry("b", 24 * 9, 3.1), entry("c", 24 * 89 - 2, 9), entry("c", 24 * 89, 9)
    )
    assumed, left_out = assume_capacity(read_histories([path]), nodes=1)
    assert [trace.name for trace in assumed] == ["us-east-1a"] and len(assumed[0].nodes) > 88 * 24 * 6
    assert [text.split(" is left out: ") for text in left_out] == [
        ["us-east-1b", "its last price is 80 days older than others'"],
        ["us-east-1c", "its prices begin 2 h before the end"],
    ]


def test_unusable_entries_are_skipped_with_their_place(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h.json",
        entry("a", 0, 20),
        entry("a", 1, "cheap"),
        entry("a", 2, -1),
        entry("b", 0, 5, ProductDescription="Windows"),
        entry("a", 3, 21, Timestamp="2026-11-01T03:00:00"),
        {"SpotPrice": "3"},
    )
    history = read_histories([path])
    assert [zone.usd.tolist() for zone in history.zones] == [[20.0]]
    places = [str(skipped).split(": ", 1)[0] for skipped in history.skipped]
    assert places == [f"h.json, entry {number}" for number in (2, 3, 5, 6)]
    assert "could not convert" in history.skipped[0].reason and "got -1" in history.skipped[1].reason
    assert "has no zone" in history.skipped[2].reason and "ProductDescription" in history.skipped[3].reason


def test_files_that_are_no_history_of_one_type_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    for text in ("[", "[]", '{"SpotPriceHistory": {}}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="is no price history"):
            read_histories([path])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_histories([tmp_path / "missing.json"])
    write(path, entry("a", 0, 20), entry("a", 0, 3, InstanceType="g5.xlarge"))
    with pytest.raises(InvalidInputError, match=r"prices of g5.xlarge, p5.48xlarge"):
        read_histories([path])
    write(path, entry("a", 0, "none"))
    with pytest.raises(InvalidInputError, match=r"prices of no type"):
        read_histories([path])


def test_traces_that_the_history_does_not_cover_are_refused(tmp_path: Path) -> None:
    history = read_histories([write(tmp_path / "h.json", entry("a", 0, 20), entry("b", 1, 20), entry("a", 9, 20))])
    for name, begin, message in (
        ("us-east-1c.json", START, "none of the history's zones"),
        ("us-east-1a-us-east-1b.json", START, "2 of the history's zones"),
        ("us-east-1a.json", None, "does not say when it begins"),
        ("us-east-1b.json", START, "begins at 2026-11-01 00:00"),
        ("us-east-1a.json", START + timedelta(hours=10), "begins at 2026-11-01 10:00"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            usd_by_tick(history, [trace(name, 4, begin)])


def test_adaptive_and_the_bound_follow_prices_that_change() -> None:
    # The first pool is dear for the first half, the second for the other; both have capacity all the time.
    prices = np.array([[[0.6] * 12 + [0.1] * 12, [0.1] * 12 + [0.6] * 12]])
    available = np.ones((1, 2, 24), dtype=bool)
    job = SimulatedJob(work_hours=20, deadline_hours=24, price_ratio=4.0, restart_hours=0.5)
    bound = lower_bound(available, 3600, job, prices).cost[0]
    # Two launches of half an hour: 21 hours at 0.1.
    assert bound == pytest.approx(2.1, abs=0.06)
    played = simulate(available, 1.0, job, prices, POLICIES["adaptive"], seed=0)
    assert played.moves is not None and played.moves[0] == 1
    assert bound <= played.cost[0] <= 1.05 * bound
    stays = simulate(available, 1.0, job, prices, POLICIES["greedy"], seed=0)
    assert stays.cost[0] == pytest.approx(0.6 * 12 + 0.1 * 8.5)


def test_prices_of_ticks_are_cut_as_the_traces_are() -> None:
    traces = [trace("a", 60), trace("b", 60)]
    job = SimulatedJob(work_hours=10, deadline_hours=15, price_ratio=4.0, restart_hours=0.2)

    def play(ratios: Any, *policies: str) -> list[PolicyFigures]:
        return replay(traces, job, policies, price_ratios=ratios, together=True, starts=30, seed=0)

    def costs(ratios: Any) -> list[float]:
        return [result.mean_normalised_cost for result in play(ratios, "greedy", "adaptive", "omniscient")]

    constant = costs([4.0, 2.0])
    # Runs with fewer changes of price than another end without a reclaim.
    (bound,) = play(np.repeat([[4.0, 2.0], [2.0, 4.0]], 30, axis=1), "omniscient")
    assert bound.interruptions == 0
    assert costs(np.repeat([[4.0], [2.0]], 60, axis=1)) == pytest.approx(constant)
    # A price that doubles in the second half costs more than the first and less than the second.
    dearer = np.repeat([[4.0], [2.0]], 60, axis=1)
    dearer[:, 30:] /= 2
    assert all(low < cost < 2 * low + 1e-9 for low, cost in zip(constant, costs(dearer), strict=True))
