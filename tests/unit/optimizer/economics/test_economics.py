"""Interruption rates, checkpoint intervals and what they do to a run's hours."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap.contract.capacity import PoolEvents
from optimizer.catalog import load
from optimizer.contract.hardware import InterruptionBand
from optimizer.economics import interruption
from optimizer.economics.checkpoint import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    CheckpointTimes,
    checkpoint_usd,
    checkpoints,
    interval_s,
)
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS, measured_hazard, spot_hazard
from optimizer.economics.outcome import Fleets, Outcome, lognormal_percentiles, predict_outcome
from tests.benchmarks.spot_policies import RESULTS


def candidates(*, fallback: bool = False, saves: CheckpointTimes | None = None, **changes: float) -> Fleets:
    saves = saves or SYNC
    values = {
        "train_hours": 10.0,
        "log_error": 0.0,
        "nodes": 2.0,
        "spot_nodes": 0.0,
        "gpus_per_node": 8.0,
        "spot_rate": 0.0,
        "spot_wait_hours": 0.0,
        "usd_per_hour": 0.0,
    } | changes
    columns = {name: np.array([value]) for name, value in values.items()}
    return Fleets(**columns, checkpoints=saves, fallback=np.array([fallback]))


def a_checkpoint(stall_s: float, save_s: float = 0.0, usd: float = 0.0) -> CheckpointTimes:
    return CheckpointTimes(stall_s=np.array([stall_s]), save_s=np.array([save_s]), usd=np.array([usd]))


SYNC = a_checkpoint(7.4)


def test_closed_band_is_read_at_its_upper_end() -> None:
    hazard = spot_hazard(InterruptionBand(0.05, 0.10, "", date(2025, 7, 28)), multi_gpu=True)
    lost_in_a_month = 1 - np.exp(-hazard.rate_per_node_hour * 730)
    assert lost_in_a_month == pytest.approx(0.10)
    assert "2025-07-28" in hazard.source


def test_open_and_missing_bands_take_the_measured_traces() -> None:
    for band in (InterruptionBand(0.20, None, "", date(2025, 7, 28)), None):
        hazard = spot_hazard(band, multi_gpu=False)
        assert hazard.rate_per_node_hour == measured_hazard(multi_gpu=False).rate_per_node_hour
        assert "p3.2xlarge" in hazard.source


@pytest.mark.parametrize("usd", [0.0, 0.1])
def test_interval_loses_least(usd: float) -> None:
    """The interval minimises stall and dollars per interval plus half an interval per interruption."""
    stall, rate, usd_per_hour = 10.0, 0.5, 30.0
    best = float(interval_s(a_checkpoint(stall, usd=usd), rate, np.array([usd_per_hour]))[0])

    def loss_usd_per_s(interval: float) -> float:
        usd_per_s = usd_per_hour / 3600
        return (stall * usd_per_s + usd) / interval + rate / 3600 * interval / 2 * usd_per_s

    assert MIN_INTERVAL_S < best < MAX_INTERVAL_S
    assert loss_usd_per_s(best) < min(loss_usd_per_s(best * 0.9), loss_usd_per_s(best * 1.1))


def test_interval_leaves_time_to_finish_a_save() -> None:
    free = np.array([0.0])
    assert interval_s(a_checkpoint(5000.0), 1.0, free)[0] >= 10_000
    assert interval_s(a_checkpoint(0.1, save_s=9000.0), 1.0, free)[0] == 9000
    assert interval_s(a_checkpoint(0.0), 1.0, free)[0] == MIN_INTERVAL_S
    # Hours that cost nothing are not spared for dollars.
    assert interval_s(a_checkpoint(0.0, usd=1.0), 1.0, free)[0] == MIN_INTERVAL_S


def test_engines_that_save_in_sync_stall_for_the_write_and_shrink_with_writers() -> None:
    one, two = (checkpoints(15, "megatron", nodes=2, gpus_per_node=4, writers=n, usd=0) for n in (1, 2))
    assert one.stall_s == pytest.approx(7.4) and two.stall_s == pytest.approx(3.7)
    assert float(one.save_s) == 0


def test_own_stall_covers_what_was_measured() -> None:
    rows = [json.loads(line) for line in (RESULTS / "checkpoint_2xh100_202611.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["phase"] == "ours"]
    assert {row["mode"] for row in rows} == {"ddp", "fsdp"}
    for row in rows:
        saves = checkpoints(row["state_gib"], "gpufleet", nodes=1, gpus_per_node=row["world_size"], writers=1, usd=0)
        assert max(row["extra_s"]) < float(saves.stall_s) < 10 * max(row["extra_s"])


def test_a_pruned_checkpoint_is_billed_for_its_requests_and_a_day_and_a_half() -> None:
    catalog = load()
    gib = 14.0
    requests = 14 * 1024 / 16
    assert checkpoint_usd(catalog, "us-east-1", gib) == pytest.approx(gib * 0.023 * 36 / 730 + requests * 0.005 / 1000)


def test_quiet_run_takes_the_training_time_and_a_launch() -> None:
    run = predict_outcome(candidates())
    rate = FAILURES_PER_GPU_HOUR * 16
    assert run.rate[0] == pytest.approx(rate)
    assert 10 + RESTART_HOURS < run.hours_expected[0] < 10.4
    assert run.waiting_hours[0] == 0


def test_half_the_runs_do_not_end_before_one_without_interruptions_could() -> None:
    """A rare wait of an hour gives a run of 12 minutes a wide lognormal: its median was 1.7 minutes."""
    short = candidates(train_hours=0.01, nodes=3.0, spot_nodes=3.0, spot_rate=0.5, spot_wait_hours=1.0)
    outcome = predict_outcome(short)
    assert RESTART_HOURS + 0.01 <= outcome.hours_p50[0] <= outcome.hours_expected[0] < outcome.hours_p95[0]


def test_interruptions_cost_what_a_simulation_says() -> None:
    """Against a simulation of the run, second by second of its events, not against the formula again."""
    rate, wait, hours = 0.4, 0.5, 20.0
    saves = a_checkpoint(7.4, save_s=120.0)
    pool: dict[str, Any] = {"spot_nodes": 1.0, "spot_rate": rate, "spot_wait_hours": wait}
    run = predict_outcome(candidates(train_hours=hours, saves=saves, **pool))
    interval = run.checkpoint_interval_s[0] / 3600
    stall, save = 7.4 / 3600, 120 / 3600
    total_rate = rate + FAILURES_PER_GPU_HOUR * 16
    random = np.random.default_rng(0)
    walls = []
    for _ in range(4000):
        wall, saved = RESTART_HOURS, 0.0
        while True:
            until = random.exponential(1 / total_rate)
            need = (hours - saved) * (1 + stall / interval)
            if until >= need:
                wall += need
                break
            saved += interval * np.floor(max(0.0, until - save) / (interval + stall))
            # The model lets an interruption strike during the restart too; so does the rate of the next one here.
            wall += until + RESTART_HOURS + (random.exponential(wait) if random.random() < rate / total_rate else 0)
        walls.append(wall)
    assert run.hours_expected[0] == pytest.approx(np.mean(walls), rel=0.05)
    assert run.hours_p95[0] == pytest.approx(np.quantile(walls, 0.95), rel=0.08)


def test_the_share_on_spot_before_a_fallback_is_that_of_a_simulation() -> None:
    rate, wait, hours, window = 0.2, 1.0, 30.0, interruption.FALLBACK_AFTER_HOURS
    one = [np.array([value]) for value in (hours, rate, wait)]
    random, shares = np.random.default_rng(0), []
    for _ in range(20_000):
        done = 0.0
        empty = random.random() < rate * wait / (1 + rate * wait)
        while not (empty and random.exponential(wait) > window) and done < hours:
            done, empty = min(hours, done + random.exponential(1 / rate)), True
        shares.append(done / hours)
    assert float(interruption.fallback_share(*one)[0][0]) == pytest.approx(np.mean(shares), abs=0.01)
    never, _ = interruption.fallback_share(np.array([10.0, 10.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    assert never.tolist() == [1.0, 1.0]
    pool: dict[str, Any] = {"spot_nodes": 1.0, "spot_rate": 1.5, "spot_wait_hours": wait}
    pool |= {"train_hours": hours, "nodes": 1.0}
    spot, both = (predict_outcome(candidates(**pool, fallback=fallback)) for fallback in (False, True))
    plain = predict_outcome(candidates(train_hours=hours, nodes=1.0))
    assert plain.hours_expected[0] < both.hours_expected[0] < spot.hours_expected[0]
    assert both.hours_p95[0] > plain.hours_p95[0] and 0 < both.spot_share[0] < 0.3 and spot.spot_share[0] == 1


def test_a_gang_that_cannot_recover_never_ends() -> None:
    run = predict_outcome(candidates(nodes=64.0, spot_nodes=64.0, spot_rate=4.0, spot_wait_hours=1.0))
    assert np.isinf(run.hours_expected[0])
    assert np.isinf(run.hours_p95[0])


def test_events_of_a_pool_weigh_half_after_the_half_life_that_predicts_best() -> None:
    with (RESULTS / "spot_memory_202611.csv").open(encoding="utf-8") as file:
        best = {row["events"]: float(row["best_days"]) for row in csv.DictReader(file) if row["family"] == "all"}
    assert best == {"losses": interruption.HALF_LIFE_DAYS, "returns": interruption.HALF_LIFE_DAYS}
    now = datetime(2026, 11, 24, tzinfo=UTC)

    def weight(first: float, last: float) -> float:
        begin, end = (now - timedelta(days=days) for days in (first, last))
        return interruption.event_weight(PoolEvents(first_at=begin, last_at=end, asked=1), now)

    assert weight(10, 10) == pytest.approx(0.5) and weight(365, 365) < 1e-10
    assert weight(0, -1) == 1, "clocks differ"
    # Spread evenly: the mean over many moments.
    assert weight(30, 4) == pytest.approx(np.mean([weight(age, age) for age in np.linspace(4, 30, 2001)]), rel=1e-3)


def test_a_gang_breaks_as_the_measured_pools_say() -> None:
    """The exponents are those of the committed rows; the 95th percentile holds for pools it was not fitted on."""
    with (RESULTS / "spot_gangs_202611.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # The largest gang of each pool.
    pools = {row["pool"]: row for row in sorted(rows, key=lambda row: int(row["gang"]))}
    clouds = {row["family"]: [pool for pool in pools.values() if pool["family"] == row["family"]] for row in rows}

    def fit(name: str, fitted: Iterable[dict[str, str]]) -> tuple[float, float]:
        values = np.array([float(row[f"{name}_exponent"]) for row in fitted])
        return float(values.mean()), float(values.mean() + 1.645 * values.std(ddof=1))

    assert [len(cloud) for cloud in clouds.values()] == [6, 11]
    assert fit("breaks", pools.values()) == pytest.approx(interruption.GANG_RECLAIMS, abs=5e-3)
    dearest = max(fit("waits", cloud)[0] for cloud in clouds.values())
    assert dearest == pytest.approx(interruption.GANG_WAITS[0], abs=5e-3)
    assert interruption.GANG_WAITS[1] >= fit("waits", pools.values())[1]
    for fitted, judged in (list(clouds.values()), list(clouds.values())[::-1]):
        limit = fit("breaks", fitted)[1]
        assert sum(float(row["breaks_exponent"]) <= limit for row in judged) >= len(judged) - 1


def test_a_gang_costs_between_one_node_and_the_sum_of_its_nodes() -> None:
    def run(nodes: float, gang: float) -> Outcome:
        return predict_outcome(
            candidates(train_hours=100.0, nodes=nodes, spot_nodes=gang, spot_rate=0.02, spot_wait_hours=1.0)
        )

    none, one, gang = run(16, 0), run(16, 1), run(16, 16)
    reclaims = [float(each.rate[0] - none.rate[0]) for each in (one, gang)]
    assert reclaims == pytest.approx([0.02, 0.02 * 16**0.17])
    assert one.hours_expected[0] < gang.hours_expected[0]
    assert gang.waiting_hours[0] == pytest.approx(gang.running_hours[0] * 0.02 * 16**0.52, rel=0.01)
    # At the 95th percentile 16 nodes wait as if each was reclaimed by itself.
    assert gang.hours_p95[0] > gang.hours_expected[0] + 0.02 * 16 * 100 - gang.waiting_hours[0]
    assert float(interruption.gang_reclaims(np.array([32.0]), p95=True)[0]) == pytest.approx(2 * 16**0.43)


@given(
    hours=st.floats(0.1, 1000),
    error=st.floats(0, 0.5),
    rate=st.floats(0, 0.2),
    nodes=st.integers(1, 8),
)
def test_spread_is_ordered_and_loss_is_not_negative(hours: float, error: float, rate: float, nodes: int) -> None:
    run = predict_outcome(
        candidates(train_hours=hours, log_error=error, nodes=nodes, spot_nodes=nodes, spot_rate=rate, spot_wait_hours=1)
    )
    assert run.hours_p50[0] <= run.hours_expected[0] <= run.hours_p95[0] or np.isinf(run.hours_p95[0])
    assert run.lost_hours[0] >= 0


def test_a_larger_spread_never_lowers_the_95th_percentile() -> None:
    _, p95 = lognormal_percentiles(np.full(400, 10.0), np.geomspace(0.01, 1e9, 400))
    assert (np.diff(p95) >= 0).all() and p95[0] >= 10.0


def test_more_reclaims_never_narrow_the_spread_of_a_spot_gang() -> None:
    """Near the rate at which the gang's 95th percentile gets no further, its hours are many times the mean."""
    runs = [
        predict_outcome(candidates(train_hours=200.0, nodes=16, spot_nodes=16, spot_rate=rate, staging_hours=0.4))
        for rate in np.linspace(0.02, 0.8, 200).tolist()
    ]
    ratios = [float(run.hours_p95[0] / run.hours_expected[0]) for run in runs if np.isfinite(run.hours_p95[0])]
    assert 20 < len(ratios) < 200
    assert np.diff(ratios).min() > -1e-9


def test_lognormal_percentiles_are_those_of_the_distribution() -> None:
    draws = np.random.default_rng(1).lognormal(1.0, 0.4, 400_000)
    p50, p95 = lognormal_percentiles(np.array([draws.mean()]), np.array([draws.std()]))
    assert p50[0] == pytest.approx(np.quantile(draws, 0.5), rel=0.01)
    assert p95[0] == pytest.approx(np.quantile(draws, 0.95), rel=0.01)
