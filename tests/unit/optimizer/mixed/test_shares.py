"""Shares of the global batch against brute force over all whole numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from optimizer.mixed.shares import Rates, Split, Training, split_freely, split_in_step

SIZES = (1, 2, 3, 4, 5, 7)


@st.composite
def groups(draw: st.DrawFn) -> Rates:
    """A group of one mix: times rise with size, larger sizes may not fit, and accumulating may fit less."""
    each = np.cumsum(draw(st.lists(st.floats(0.01, 2), min_size=len(SIZES), max_size=len(SIZES))))
    fixed = draw(st.floats(0, 1))
    saved = draw(st.floats(0.7, 1))
    fits_once = draw(st.integers(0, len(SIZES)))
    fits_each = draw(st.integers(0, fits_once))
    place = np.arange(len(SIZES))
    return Rates(
        ranks=np.array([draw(st.integers(1, 12))]),
        sizes=np.array(SIZES),
        once=np.where(place < fits_once, saved * (each + fixed), np.inf)[None],
        each=np.where(place < fits_each, each, np.inf)[None],
        fixed=np.full((1, len(SIZES)), fixed),
        # The larger the micro-batch, the more hides behind it.
        shown=np.array([[draw(st.floats(0, 3)) / (1 + n * draw(st.floats(0, 1))) for n in range(len(SIZES))]]),
        more=np.zeros((1, len(SIZES))),
    )


def computed(group: Rates, place: int, accum: int) -> float:
    if accum == 1:
        return float(group.once[0, place])
    return float(accum * group.each[0, place] + group.fixed[0, place])


def step(a: Rates, b: Rates, setting: tuple[int, int], accum: tuple[int, int]) -> float:
    pairs = list(zip((a, b), setting, accum, strict=True))
    shown = (float(group.shown[0, place] + (k - 1) * group.more[0, place]) for group, place, k in pairs)
    return max(computed(group, place, k) for group, place, k in pairs) + max(shown)


def brute_force(a: Rates, b: Rates, training: Training, together: bool) -> float:
    """Least time for all samples over every micro-batch and accumulation of both groups."""
    best = math.inf
    for i, j in product(range(len(SIZES)), repeat=2):
        of_a, of_b = int(a.ranks[0]) * SIZES[i], int(b.ranks[0]) * SIZES[j]
        unit = of_a + of_b if together else math.gcd(of_a, of_b)
        batch = training.batch if training.exact else training.batch // unit * unit
        for k_a in range(1, batch // of_a + 1):
            k_b, left = divmod(batch - of_a * k_a, of_b)
            if left or k_b < 1 or (together and k_a != k_b):
                continue
            best = min(best, math.ceil(training.samples / batch) * step(a, b, (i, j), (k_a, k_b)))
    return best


def check(split: Split, a: Rates, b: Rates, training: Training, together: bool) -> None:
    best = brute_force(a, b, training, together)
    if math.isinf(best):
        assert np.isinf(split.seconds[0])
        return
    assert split.steps[0] * split.seconds[0] == pytest.approx(best)
    k_a, k_b = split.grad_accum[0].tolist()
    i, j = split.setting[0].tolist()
    assert a.ranks[0] * SIZES[i] * k_a + b.ranks[0] * SIZES[j] * k_b == split.global_batch[0]
    assert split.steps[0] == math.ceil(training.samples / split.global_batch[0])
    assert (split.global_batch[0] == training.batch) if training.exact else (split.global_batch[0] <= training.batch)
    assert split.seconds[0] == pytest.approx(step(a, b, (i, j), (k_a, k_b)))
    assert not together or k_a == k_b


@settings(max_examples=400, deadline=None)
@given(a=groups(), b=groups(), batch=st.integers(2, 200), samples=st.integers(1, 10_000), exact=st.booleans())
def test_shares_are_the_integer_optimum(a: Rates, b: Rates, batch: int, samples: int, exact: bool) -> None:
    training = Training(samples=samples, batch=batch, exact=exact)
    check(split_freely(a, b, training), a, b, training, together=False)


@settings(max_examples=200, deadline=None)
@given(a=groups(), b=groups(), batch=st.integers(2, 200), samples=st.integers(1, 10_000), exact=st.booleans())
def test_shares_in_step_are_the_integer_optimum(a: Rates, b: Rates, batch: int, samples: int, exact: bool) -> None:
    a, b = (replace(group, more=0.5 * group.shown) for group in (a, b))
    training = Training(samples=samples, batch=batch, exact=exact)
    check(split_in_step(a, b, training), a, b, training, together=True)


def rates(ranks: NDArray[np.int64], sizes: NDArray[np.int64], each: NDArray[np.float64]) -> Rates:
    """Groups that compute and do nothing else."""
    nothing = np.zeros(each.shape)
    return Rates(ranks=ranks, sizes=sizes, once=each, each=each, fixed=nothing, shown=nothing, more=nothing)


def test_mixes_solved_together_are_those_solved_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array(SIZES)
    each = rng.uniform(0.1, 1, (2, 9, sizes.size)).cumsum(axis=2)
    ranks = rng.integers(1, 9, (2, 9))
    training = Training(samples=5000, batch=96, exact=True)
    rows = [slice(0, 9), *(slice(n, n + 1) for n in range(9))]

    def group(g: int, row: slice) -> Rates:
        return rates(ranks[g, row], sizes, each[g, row])

    for share in (split_freely, split_in_step):
        every, *alone = (share(group(0, row), group(1, row), training) for row in rows)
        for n, one in enumerate(alone):
            assert every.seconds[n] == one.seconds[0]
            assert (every.grad_accum[n] == one.grad_accum[0]).all()


def test_a_batch_of_a_billion_is_shared_as_well() -> None:
    """No table over shares: the work does not grow with the batch."""
    a = rates(np.array([8]), np.array([1]), np.array([[1.0]]))
    b = rates(np.array([24]), np.array([1]), np.array([[3.0]]))
    split = split_freely(a, b, Training(samples=10**9, batch=10**9, exact=True))
    # Equal times need k_a = 3 k_b: 8 x 3 k + 24 k = 48 k, and 10^9 / 48 is no whole number.
    k_a, k_b = split.grad_accum[0].tolist()
    assert 8 * k_a + 24 * k_b == 10**9
    assert split.seconds[0] == max(k_a, 3 * k_b)
    assert split.seconds[0] - 10**9 / 16 < 3


def test_what_a_step_costs_a_group_once_moves_the_balance() -> None:
    """With 30 seconds of its own, b computes 15 of 60 micro-batches: 45 seconds each."""
    one = np.array([[1.0]])
    a = rates(np.array([1]), np.array([1]), one)
    b = replace(a, once=31 * one, fixed=30 * one)
    split = split_freely(a, b, Training(samples=600, batch=60, exact=True))
    assert split.grad_accum[0].tolist() == [45, 15]
    assert split.seconds[0] == 45
