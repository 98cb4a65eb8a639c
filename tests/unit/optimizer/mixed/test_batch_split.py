"""Batch splits against brute force over all whole numbers."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.mixed.batch_split import BatchSplit, GroupTimes, split_batch

SIZES = (1, 2, 3, 4, 5, 7)


@st.composite
def group_times(draw: st.DrawFn) -> GroupTimes:
    """Times that rise with the micro-batch; larger ones may not fit, and accumulating may fit less."""
    further = np.cumsum(draw(st.lists(st.floats(0.01, 2), min_size=len(SIZES), max_size=len(SIZES))))
    fits_once = draw(st.integers(0, len(SIZES)))
    fits_again = draw(st.integers(0, fits_once))
    place = np.arange(len(SIZES))
    # The larger the micro-batch, the more communication hides behind it.
    exposed = np.array([draw(st.floats(0, 3)) / (1 + n * draw(st.floats(0, 1))) for n in range(len(SIZES))])
    return GroupTimes(
        ranks=draw(st.integers(1, 12)),
        micro_batch=np.array(SIZES),
        first_s=np.where(place < fits_once, further + draw(st.floats(0, 1)), np.inf),
        further_s=np.where(place < fits_again, further, np.inf),
        first_exposed_s=exposed,
        further_exposed_s=draw(st.floats(0, 1)) * exposed,
    )


def step_s(group: GroupTimes, setting: int, accum: int) -> tuple[float, float]:
    """Computation and exposed communication of a step."""
    further = (accum - 1) * float(group.further_s[setting]) if accum > 1 else 0.0
    exposed = float(group.first_exposed_s[setting]) + (accum - 1) * float(group.further_exposed_s[setting])
    return float(group.first_s[setting]) + further, exposed


def brute_force(a: GroupTimes, b: GroupTimes, batch: int, in_step: bool) -> float:
    """Least seconds of a step of exactly ``batch`` samples."""
    best = math.inf
    for i, j in product(range(len(SIZES)), repeat=2):
        for k_a, k_b in product(range(1, batch // a.ranks + 1), range(1, batch // b.ranks + 1)):
            if (in_step and k_a != k_b) or a.ranks * SIZES[i] * k_a + b.ranks * SIZES[j] * k_b != batch:
                continue
            parts = list(zip(step_s(a, i, k_a), step_s(b, j, k_b), strict=True))
            best = min(best, sum(max(pair) for pair in parts))
    return best


def check(split: BatchSplit, a: GroupTimes, b: GroupTimes, batch: int) -> None:
    groups, sizes = (a, b), [SIZES[setting] for setting in split.setting]
    whole = sum(g.ranks * m * k for g, m, k in zip(groups, sizes, split.grad_accum, strict=True))
    assert whole == batch
    times = [step_s(g, s, k) for g, s, k in zip(groups, split.setting, split.grad_accum, strict=True)]
    assert split.step_time_s == pytest.approx(sum(max(pair) for pair in zip(*times, strict=True)))


@settings(max_examples=60, deadline=None)
@given(a=group_times(), b=group_times(), batch=st.integers(2, 40), in_step=st.booleans())
def test_a_given_batch_is_split_as_brute_force_splits_it(
    a: GroupTimes, b: GroupTimes, batch: int, in_step: bool
) -> None:
    split = split_batch(a, b, batch=batch, in_step=in_step)
    best = brute_force(a, b, batch, in_step)
    if split is None:
        assert best == math.inf
        return
    check(split, a, b, batch)
    assert split.step_time_s == pytest.approx(best)
