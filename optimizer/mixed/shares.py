"""How two groups of unequal ranks share a global batch so that the slower one is as fast as possible, in whole numbers.

A rank of group i runs k_i micro-batches of m_i samples and takes k_i t_i(m_i) seconds. Sought are m and k that minimise
the larger of the two times while the ranks' samples add up to the global batch: R_a m_a k_a + R_b m_b k_b = G.

For one pair of micro-batches that is a linear Diophantine equation: along its solutions one time rises and the other
falls, so the best is one of the two solutions around the balance point, or an end (a single micro-batch needs no memory
for accumulation, and its time may be off the line). That is exact, and all pairs of micro-batches of all mixes are
solved at once; tests compare with brute force.
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
    """Seconds of one micro-batch on one rank of a group, by size; a row a mix.

    Attributes:
        ranks: of the group, one a mix.
        sizes: micro-batches considered, samples.
        once: seconds where a step is that one micro-batch, mix x size; infinite where it does not fit.
        each: seconds where a step accumulates several: at least ``once``, as memory also holds the gradients.
    """

    ranks: Ints
    sizes: Ints
    once: Floats
    each: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The shares of each mix that take least time for all samples.

    Attributes:
        micro_batch: samples of a micro-batch of each group, mix x 2.
        grad_accum: micro-batches of a step, mix x 2.
        global_batch: samples of a step.
        steps: optimizer steps.
        seconds: computation of one step on the slower group; infinite where no shares add up.
    """

    micro_batch: Ints
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
    # Axes: mix, micro-batch of a, micro-batch of b.
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
    once_a, each_a = a.once[:, :, None], a.each[:, :, None]
    once_b, each_b = b.once[:, None, :], b.each[:, None, :]
    with np.errstate(invalid="ignore"):
        # k_a each_a = k_b each_b. Where accumulating never fits, only the ends can be solutions.
        balance = whole * each_b / (of_b * each_a + of_a * each_b)
        balance = np.where(np.isfinite(balance), balance, first)
        below = first + np.floor((balance - first) / period).astype(np.int64) * period
        k_a = np.stack([first, last, np.clip(below, first, last), np.clip(below + period, first, last)], axis=1)
        k_b = (whole[:, None] - of_a[:, None] * k_a) // of_b[:, None]
        seconds = np.maximum(
            np.where(k_a == 1, once_a[:, None], k_a * each_a[:, None]),
            np.where(k_b == 1, once_b[:, None], k_b * each_b[:, None]),
        )
    steps = -(-training.samples // np.maximum(whole, 1))
    seconds = np.where(legal[:, None], seconds, np.inf)
    return _best(a, b, np.where(legal[:, None], steps[:, None] * seconds, np.inf), k_a, k_b, whole, steps, seconds)


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
    once = np.maximum(a.once[:, :, None], b.once[:, None, :])
    each = np.maximum(a.each[:, :, None], b.each[:, None, :])
    seconds = np.where(legal, np.where(accum == 1, once, accum * each), np.inf)
    steps = -(-training.samples // (accum * together))
    k = accum[:, None]
    return _best(a, b, (steps * seconds)[:, None], k, k, accum * together, steps, seconds[:, None])


def _samples(group: Rates) -> Ints:
    """Samples of one micro-batch on all ranks of a group, mix x size."""
    return group.ranks[:, None] * group.sizes


def _none(a: Rates) -> Split:
    """What is found where no micro-batch fits."""
    two, one = np.ones((a.ranks.size, 2), dtype=np.int64), np.ones(a.ranks.size, dtype=np.int64)
    return Split(micro_batch=two, grad_accum=two, global_batch=one, steps=one, seconds=np.full(one.shape, np.inf))


def _best(a: Rates, b: Rates, total: Floats, k_a: Ints, k_b: Ints, whole: Ints, steps: Ints, seconds: Floats) -> Split:
    """The candidates of least ``total``; axes mix, candidate, size of a, size of b (``whole``, ``steps``: without)."""
    mix = np.arange(len(total))
    n, i, j = np.unravel_index(total.reshape(mix.size, -1).argmin(axis=1), total.shape[1:])
    return Split(
        micro_batch=np.stack([a.sizes[i], b.sizes[j]], axis=1),
        grad_accum=np.stack([k_a[mix, n, i, j], k_b[mix, n, i, j]], axis=1),
        global_batch=whole[mix, i, j],
        steps=steps[mix, i, j],
        seconds=np.where(np.isfinite(total[mix, n, i, j]), seconds[mix, n, i, j], np.inf),
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
