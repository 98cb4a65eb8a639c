"""What a run learns of spot pools: the order of tries, the worth of a move."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bootstrap.contract.codec import from_json, to_json
from bootstrap.contract.pools import (
    YOUNG_S,
    PoolRecord,
    age_since_s,
    came,
    left,
    rank_pools,
    reclaimed,
    refused,
    stay_s,
)

HOUR = 3600.0


def order(
    pools: dict[str, PoolRecord], now_s: float, *, running_price: float | None = None, **prices: float
) -> list[str]:
    ranked = rank_pools(
        pools,
        now_s,
        prices={name: prices.get(name, 0.3) for name in pools},
        running_price=running_price,
        restart_s=0.2 * HOUR,
        try_s=120,
    )
    return [prospect.name for prospect in ranked]


def lived(hours: float, times: int) -> PoolRecord:
    """A pool that gave nodes for some hours each time and took them back."""
    pool = PoolRecord()
    for start in range(times):
        pool = reclaimed(came(pool, start * 100 * HOUR), (start * 100 + hours) * HOUR)
    return pool


def test_a_pool_that_has_just_refused_comes_last_until_time_has_passed() -> None:
    pools = {"a": refused(PoolRecord(), 0.0), "b": PoolRecord(), "c": PoolRecord()}
    assert order(pools, 60.0) == ["b", "c", "a"]
    longer = {"a": refused(PoolRecord(), 0.0), "b": refused(refused(PoolRecord(), 0.0), 3 * HOUR)}
    assert order(longer, 3 * HOUR + 600) == ["a", "b"]


def test_pools_that_keep_nodes_come_before_pools_that_take_them_back() -> None:
    steady, flapping = lived(20, 12), lived(0.1, 12)
    assert stay_s(steady, 0) > 1.3 * stay_s(PoolRecord(), 0) > 2 * stay_s(flapping, 0)
    assert order({"flapping": flapping, "steady": steady}, 1000 * HOUR) == ["steady", "flapping"]


def test_a_pool_never_asked_comes_before_one_that_kept_nodes_for_long_and_took_them_back_lately() -> None:
    lately = reclaimed(came(PoolRecord(), 0.0), 20 * HOUR)
    assert order({"lately": lately, "new": PoolRecord()}, 24 * HOUR) == ["new", "lately"]


@pytest.mark.parametrize("hours", [1, 2, 4, 8])
def test_capacity_met_after_a_refusal_stays_as_long_as_in_pools_drawn_from_the_prior(hours: float) -> None:
    draw = np.random.default_rng(0)
    stays: list[float] = []
    while len(stays) < 4000:
        # The pool has been empty for six hours; stretches of both kinds follow each other until it is asked.
        at, has, length = 0.0, False, (6 + YOUNG_S / HOUR) * (1 / (1 - draw.random()) - 1)
        while at + length < hours:
            at, has, length = at + length, not has, YOUNG_S / HOUR * (1 / (1 - draw.random()) - 1)
        if has:
            stays.append(min(at + length - hours, 8.0))
    mean_s = sum(stays) / len(stays) * HOUR
    assert stay_s(PoolRecord(), age_since_s(hours * HOUR)) == pytest.approx(mean_s, rel=0.06)


def test_the_prior_alone_is_the_rate_of_the_traces() -> None:
    # E[min(stay, 8 h)] of the rate 1 / (age + young): young x ln(1 + 8 h / young).
    assert stay_s(PoolRecord(), 0) == pytest.approx(YOUNG_S * 3.0445, rel=1e-3)
    assert stay_s(PoolRecord(), 5 * HOUR) > 4 * stay_s(PoolRecord(), 0)
    half = reclaimed(came(PoolRecord(), 0), YOUNG_S * 1.718281828)
    assert half.reclaims == 1 and half.expected_reclaims == pytest.approx(1)


def test_a_cheaper_pool_is_worth_a_restart_and_an_equal_one_is_not() -> None:
    pools = {"a": came(PoolRecord(), 0), "b": PoolRecord(), "c": PoolRecord()}
    assert order(pools, 9 * HOUR, running_price=0.3) == []
    assert order(pools, 9 * HOUR, running_price=0.6, a=0.6, c=0.2) == ["c", "b"]
    assert order(pools, 9 * HOUR, running_price=0.3, b=0.27) == []
    # On-demand nodes run: any pool that earns back its restart.
    assert order({"b": PoolRecord(), "dear": PoolRecord()}, 0.0, running_price=1.0, dear=0.97) == ["b"]


def test_pools_that_never_earn_back_their_restart_are_left_out() -> None:
    assert order({"flapping": lived(0.02, 30)}, 3000 * HOUR, flapping=0.9) == []


def test_a_pool_is_kept_as_json() -> None:
    pool = refused(left(came(refused(PoolRecord(), 5.0), 700.0), 9000.0), 9100.0)
    assert pool.returns == 1 and pool.reclaims == 0 and pool.expected_reclaims > 0
    assert from_json(PoolRecord, json.loads(json.dumps(to_json(pool))), "pool") == pool
