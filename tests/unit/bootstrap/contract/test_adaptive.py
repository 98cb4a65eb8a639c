"""The adaptive policy's rule: it keeps the deadline, learns, says why, and is one rule for floats and arrays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from bootstrap.contract.adaptive import (
    FIRST_AGE_HOURS,
    IDLE,
    ON_DEMAND,
    REASONS,
    SPOT,
    Pool,
    Terms,
    band_factor,
    decide,
)
from optimizer.economics.simulation.policies import ARRAYS

TERMS = Terms(work_hours=12, deadline_hours=15, price_ratio=3.3, restart_hours=0.2, restart_bound_hours=0.5)


def decision(pool: Pool, mode: int, work: float, left: float, *, loading: bool = False) -> tuple[int, str]:
    mode, reason = decide(TERMS, pool, mode=mode, loading=loading, work_hours=work, left_hours=left, tick_hours=1 / 6)
    return mode, REASONS[reason]


def test_decisions_and_their_reasons() -> None:
    assert decision(Pool(available=True, age_hours=5.0), IDLE, 12, 15) == (SPOT, REASONS[0])
    # Droughts begin with a wait: most are short. The slack of the next launches is not waited away.
    assert decision(Pool(available=False, age_hours=0.1), IDLE, 6, 9) == (IDLE, REASONS[1])
    assert decision(Pool(available=False, age_hours=20.0), IDLE, 12, 12.95) == (ON_DEMAND, REASONS[2])
    # The slack is what a launch may take: nothing else is allowed any more.
    assert decision(Pool(available=False, age_hours=0.1), IDLE, 6, 6.6) == (ON_DEMAND, REASONS[3])
    assert decision(Pool(available=True, age_hours=5.0), IDLE, 6, 6.6) == (ON_DEMAND, REASONS[3])
    # Spot that works is safe with the slack of one launch, and is kept.
    assert decision(Pool(available=True, age_hours=5.0), SPOT, 6, 6.6) == (SPOT, REASONS[0])
    assert decision(Pool(available=True, age_hours=5.0), SPOT, 6, 6.6, loading=True)[0] == ON_DEMAND


def test_a_pool_that_came_back_a_moment_ago_has_to_prove_itself_before_on_demand_gives_way() -> None:
    flaky = Pool(available=True, age_hours=0.0, losses=40.0, expected_losses=5.0)
    assert decision(flaky, ON_DEMAND, 6, 7.5) == (ON_DEMAND, REASONS[4])
    assert decision(Pool(available=True, age_hours=13.0), ON_DEMAND, 6, 7.5)[0] == SPOT


def test_factors_begin_at_the_prior_and_follow_the_pool() -> None:
    pool = Pool(available=True, reclaim_factor=band_factor(2.5e-4))
    assert pool.loss_factor == pytest.approx(2.5e-4 * 24.4) and pool.return_factor == 1
    for tick in range(200):  # comes and goes each half hour
        pool.observe(tick // 3 % 2 == 0, 1 / 6)
    assert pool.losses == 33 and pool.returns == 33
    assert pool.return_factor > 1.15
    steady = Pool(available=True)
    for _ in range(2000):
        steady.observe(True, 1 / 6)
    assert steady.loss_factor < 0.7 and steady.age_hours == pytest.approx(FIRST_AGE_HOURS + 2000 / 6)


def test_arrays_and_floats_are_decided_by_the_same_rule() -> None:
    draw = random.Random(4)  # noqa: S311
    states = [
        {
            "available": draw.random() < 0.5,
            "age_hours": draw.expovariate(0.3),
            "losses": draw.choice([0.0, 15.0]),
            "expected_losses": draw.choice([0.0, 15.0]),
            "returns": draw.choice([0.0, 15.0]),
            "expected_returns": draw.choice([0.0, 15.0]),
        }
        for _ in range(400)
    ]
    runs = []
    for state in states:
        mode = draw.choice([IDLE, ON_DEMAND, SPOT] if state["available"] else [IDLE, ON_DEMAND])
        work = draw.uniform(0.1, 12)
        runs.append((mode, mode != IDLE and draw.random() < 0.2, work, work + draw.uniform(0, 3)))
    singly = [
        decide(TERMS, Pool(**state), mode=mode, loading=loading, work_hours=work, left_hours=left, tick_hours=0.1)
        for state, (mode, loading, work, left) in zip(states, runs, strict=True)
    ]
    pools: dict[str, Any] = {name: np.array([state[name] for state in states]) for name in states[0]}
    columns = [np.array(column) for column in zip(*runs, strict=True)]
    together = decide(
        TERMS,
        Pool(**pools),
        mode=columns[0],
        loading=columns[1],
        work_hours=columns[2],
        left_hours=columns[3],
        tick_hours=0.1,
        arithmetic=ARRAYS,
    )
    assert together.mode.tolist() == [one.mode for one in singly]
    assert together.reason.tolist() == [one.reason for one in singly]
    assert {one.reason for one in singly} == set(range(len(REASONS)))
    # Observed in turn, both learn the same.
    alone, many = Pool(available=True), Pool(available=np.array([True]), age_hours=np.array([FIRST_AGE_HOURS]))
    for _ in range(50):
        available = draw.random() < 0.6
        alone.observe(available, 0.5)
        many.observe(np.array([available]), 0.5, ARRAYS)
    assert (many.loss_factor[0], many.return_factor[0], many.age_hours[0]) == (
        alone.loss_factor,
        alone.return_factor,
        alone.age_hours,
    )


def test_no_deadline_is_missed_whatever_pool_and_launches_do() -> None:
    """Random histories: launches up to their bound, lost work up to the interval, availability at its worst moment."""
    terms = Terms(
        work_hours=6, deadline_hours=9, price_ratio=3, restart_hours=0.2, restart_bound_hours=0.6, lost_bound_hours=0.5
    )
    tick = 0.1
    for seed in range(150):
        draw = random.Random(seed)  # noqa: S311
        turns = draw.choice([0.03, 0.2, 0.5])
        pool = Pool(available=draw.random() < 0.5)
        mode, work, loading, fresh, clock = IDLE, 6.0, 0.0, 0.0, 0.0
        while work > 1e-9:
            available = pool.available != (draw.random() < turns)
            if clock:
                pool.observe(available, tick)
            if mode == SPOT and not pool.available:
                mode, work, loading = IDLE, work + min(draw.uniform(0, 0.5), fresh), 0.0
            wanted = decide(
                terms, pool, mode=mode, loading=loading > 0, work_hours=work, left_hours=9 - clock, tick_hours=tick
            ).mode
            assert wanted != SPOT or pool.available
            if wanted not in (mode, IDLE):
                loading, fresh = draw.choice([0.2, 0.6]), 0.0
            mode = wanted
            if mode != IDLE:
                worked = max(tick - loading, 0.0)
                loading, work, fresh = max(loading - tick, 0.0), work - worked, fresh + worked
            clock += tick
        assert clock + work <= 9 + 1e-9, seed  # the last tick ends with the work
