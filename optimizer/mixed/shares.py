"""How two groups of unequal ranks share a global batch so that the slower one is as fast as possible, in whole numbers.

A rank of group i runs k_i micro-batches of m_i samples and computes for k_i t_i + f_i seconds; communication that shows
behind the group that hides it worse comes on top. Sought are the settings (m, and how activations are kept) and k that
minimise the larger computation and that communication, while the ranks' samples add up to the global batch:
R_a m_a k_a + R_b m_b k_b = G.

For one pair of settings that is a linear Diophantine equation: along its solutions one computation rises and the other
falls, and what shows once a step stays, so the best is one of the two solutions around the balance point, or an end (a
single micro-batch may fit where several do not). That is exact, and all pairs of settings of all mixes are solved at
once; tests compare with brute force.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is to be trained.

    Attributes:
        samples: to train on.
        batch: the global batch; where it is not ``exact``, the largest one allowed: each pair of micro-batches then
            comes as near to it as whole micro-batches can.
        exact: whether the global batch must be ``batch``.
    """

    samples: int
    batch: int
    exact: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of one group's ranks, by setting; a row a mix.

    Attributes:
        ranks: of the group, one a mix.
        sizes: samples of a micro-batch, one a setting.
        once: computation of a step of one micro-batch, mix x setting; infinite where it does not fit.
        each, fixed: a step of k > 1 computes for k each + fixed; infinite where it does not fit.
        shown, more: communication that shows in a step of one micro-batch, and what each further one adds.
    """

    ranks: Ints
    sizes: Ints
    once: Floats
    each: Floats
    fixed: Floats
    shown: Floats
    more: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The shares of each mix that take least time for all samples.

    Attributes:
        setting: of each group, its place among the group's settings, mix x 2.
        grad_accum: micro-batches of a step, mix x 2.
        global_batch: samples of a step.
        steps: optimizer steps.
        seconds: one step; infinite where no shares add up.
    """

    setting: Ints
    grad_accum: Ints
    global_batch: Ints
    steps: Ints
    seconds: Floats


def split_freely(a: Rates, b: Rates, training: Training) -> Split:
    """The fastest shares where each group accumulates as often as it likes (DDP and ZeRO-1 meet once a step).

    Args:
        a, b: the groups.
        training: what is to be trained.
    """
    # Axes: mix, setting of a, setting of b.
    if not a.sizes.size or not b.sizes.size:
        return _none(a)
    of_a, of_b = _samples(a)[:, :, None], _samples(b)[:, None, :]
    common = np.gcd(of_a, of_b)
    whole = training.batch - training.batch % common
    # All solutions: k_a = first + n period, and k_b falls by of_a / common with each n. Both are at least 1.
    period = of_b // common
    first = whole // common % period * _inverse(of_a // common, period) % period
    first = np.where(first == 0, period, first)
    most = (whole - of_b) // of_a
    legal = first <= most
    if training.exact:
        legal &= whole == training.batch
    last = np.where(legal, most - (most - first) % period, first)
    each_a, each_b = a.each[:, :, None], b.each[:, None, :]
    ahead = of_b * (b.fixed[:, None, :] - a.fixed[:, :, None])
    with np.errstate(invalid="ignore"):
        # k_a each_a + fixed_a = k_b each_b + fixed_b. Where accumulating never fits, only the ends can be solutions.
        balance = (whole * each_b + ahead) / (of_b * each_a + of_a * each_b)
    balance = np.clip(np.where(np.isfinite(balance), balance, first), first, last)
    below = first + np.floor((balance - first) / period).astype(np.int64) * period
    k_a = np.stack([first, last, below, np.minimum(below + period, last)], axis=1)
    # What is not legal has no count; it is any.
    k_b = np.maximum((whole[:, None] - of_a[:, None] * k_a) // of_b[:, None], 1)
    k_a = np.maximum(k_a, 1)
    seconds = np.where(legal[:, None], _seconds(a, b, k_a, k_b), np.inf)
    return _best(seconds, k_a, k_b, whole, training.samples)


def split_in_step(a: Rates, b: Rates, training: Training) -> Split:
    """The fastest shares where all ranks run the same number of micro-batches (ZeRO-2 and 3 meet in every one).

    Arguments and result are those of ``split_freely``.
    """
    if not a.sizes.size or not b.sizes.size:
        return _none(a)
    together = _samples(a)[:, :, None] + _samples(b)[:, None, :]
    accum = training.batch // together
    legal = (accum * together == training.batch) if training.exact else (accum >= 1)
    accum = np.maximum(accum, 1)
    k = accum[:, None]
    seconds = np.where(legal[:, None], _seconds(a, b, k, k), np.inf)
    return _best(seconds, k, k, accum * together, training.samples)


def _seconds(a: Rates, b: Rates, k_a: Ints, k_b: Ints) -> Floats:
    """Seconds of a step; axes mix, candidate, setting of a, setting of b."""

    def over(values: Floats, group: Rates) -> Floats:
        return values[:, None, :, None] if group is a else values[:, None, None, :]

    def computed(group: Rates, k: Ints) -> Floats:
        several = k * over(group.each, group) + over(group.fixed, group)
        return np.where(k == 1, over(group.once, group), several)

    def shown(group: Rates, k: Ints) -> Floats:
        return over(group.shown, group) + (k - 1) * over(group.more, group)

    return np.maximum(computed(a, k_a), computed(b, k_b)) + np.maximum(shown(a, k_a), shown(b, k_b))


def _samples(group: Rates) -> Ints:
    """Samples of one micro-batch on all ranks of a group, mix x size."""
    return group.ranks[:, None] * group.sizes


def _none(a: Rates) -> Split:
    """What is found where no setting fits."""
    two, one = np.zeros((a.ranks.size, 2), dtype=np.int64), np.ones(a.ranks.size, dtype=np.int64)
    return Split(setting=two, grad_accum=two, global_batch=one, steps=one, seconds=np.full(one.shape, np.inf))


def _best(seconds: Floats, k_a: Ints, k_b: Ints, whole: Ints, samples: int) -> Split:
    """The candidates that take least for all samples: axes mix, candidate, setting of a, of b; ``whole`` has no 2nd."""
    steps = -(-samples // np.maximum(whole, 1))
    total = steps[:, None] * seconds
    mix = np.arange(len(total))
    n, i, j = np.unravel_index(total.reshape(mix.size, -1).argmin(axis=1), total.shape[1:])
    return Split(
        setting=np.stack([i, j], axis=1),
        grad_accum=np.stack([k_a[mix, n, i, j], k_b[mix, n, i, j]], axis=1),
        global_batch=whole[mix, i, j],
        steps=steps[mix, i, j],
        seconds=seconds[mix, n, i, j],
    )


def _inverse(number: Ints, modulus: Ints) -> Ints:
    """The inverse of each number modulo another that it has no divisor in common with; 0 modulo 1 (Euclid)."""
    r, following = modulus, number % modulus
    t, next_t = np.zeros_like(r), np.ones_like(r)
    while (going := following > 0).any():
        quotient = r // np.where(going, following, 1)
        r, following = np.where(going, following, r), np.where(going, r - quotient * following, 0)
        t, next_t = np.where(going, next_t, t), np.where(going, t - quotient * next_t, next_t)
    return t % modulus
