"""Bounds of mixed fleets: never above a cost that a mix can have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.outcome import Candidates, outcome
from optimizer.mixed.bounds import Bounds, longest_hours

SPEED = st.floats(0.01, 50)


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    return Bounds(
        usd_per_hour=np.array([[draw(st.floats(0.001, 60)), draw(st.floats(0.001, 60))]]),
        speed=np.array([[draw(SPEED), draw(SPEED)]]),
        most=np.array([[float(draw(st.integers(1, 20))), float(draw(st.integers(1, 20)))]]),
        fleet_usd_per_hour=np.array([draw(st.floats(0, 2))]),
        reclaims=np.array([draw(st.sampled_from([0.0, 0.01, 1.0, 2.5]))]),
        unit_hours=np.array([draw(st.floats(0.1, 1000))]),
        shown_hours=np.array([draw(st.floats(0, 10))]),
        longest_hours=np.array([draw(st.one_of(st.just(np.inf), st.floats(0.01, 200)))]),
    )


@settings(max_examples=500, deadline=None)
@given(pairs=bounds())
def test_the_least_of_a_pair_is_that_of_its_cheapest_nodes(pairs: Bounds) -> None:
    """Over a grid of whole and fractional nodes, nothing is below the bound, and with fractions something is near."""
    x, y = (np.linspace(1, most, int(8 * (most - 1)) + 1) for most in pairs.most[0])
    nodes = np.array(np.meshgrid(x, y, indexing="ij")).reshape(2, -1).T
    each = pairs.least_usd_of(np.zeros(len(nodes), dtype=np.intp), nodes)
    least = pairs.least_usd()[0]
    assert (each >= least * (1 - 1e-9)).all()
    if np.isinf(pairs.longest_hours[0]) and np.isfinite(each.min()):
        assert each.min() <= least * 1.15  # an eighth of a node away at most


@settings(max_examples=300, deadline=None)
@given(
    train_hours=st.floats(0.001, 500),
    error=st.sampled_from([0.02, 0.08, 0.4]),
    nodes=st.integers(2, 64),
    spot=st.booleans(),
    deadline=st.floats(0.21, 800),
)
def test_what_keeps_a_deadline_is_within_the_longest_hours(
    train_hours: float, error: float, nodes: int, spot: bool, deadline: float
) -> None:
    one = np.ones(1)
    run = outcome(
        Candidates(
            train_hours=train_hours * one,
            log_error=error * one,
            nodes=nodes * one,
            spot_nodes=nodes * one * spot,
            gpus_per_node=8 * one,
            spot_rate=0.3 * one * spot,
            spot_wait_hours=one,
            checkpoint_gib=one,
            checkpoint_writers=one,
        )
    )
    if run.hours_p95[0] <= deadline:
        assert train_hours * np.exp(error**2 / 2) <= longest_hours(deadline, np.array([error]))[0]


def test_no_deadline_and_one_that_a_restart_alone_misses() -> None:
    assert longest_hours(None, np.array([0.1])) == np.inf
    assert longest_hours(RESTART_HOURS * 0.9, np.array([0.1, 0.4])) == pytest.approx([0, 0], abs=1e-6)
