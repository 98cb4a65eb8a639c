"""How two groups of unequal ranks share a global batch so that the slower one is as fast as possible, in whole numbers.

A rank of group i runs k_i micro-batches of m_i samples and takes k_i t_i(m_i) seconds. Sought are m and k that minimise
the larger of the two times while the ranks' samples add up to the global batch: R_a m_a k_a + R_b m_b k_b = G.

For one pair of micro-batches that is a linear Diophantine equation: along its solutions one time rises and the other
falls, so the best is one of the two solutions around the balance point, or an end (a single micro-batch costs no
accumulation, and its time is off the line). That is exact, and all pairs of micro-batches are solved at once; tests
compare with brute force.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds of one micro-batch on one rank of a group, by size: arrays over the sizes considered.

    Attributes:
        ranks: of the group.
        once: seconds where a step is that one micro-batch; infinite where it does not fit.
        each: seconds where a step accumulates several; at least ``once``, as memory also holds the gradients.
    """

    ranks: int
    once: Floats
    each: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Shares of two groups.

    Attributes:
        size: place of each group's micro-batch among the sizes considered.
        grad_accum: micro-batches of a step, of each group.
        global_batch: samples of a step.
        steps: optimizer steps.
        seconds: computation of one step on the slower group.
    """

    size: tuple[int, int]
    grad_accum: tuple[int, int]
    global_batch: int
    steps: int
    seconds: float


def split_freely(sizes: Ints, a: Rates, b: Rates, samples: int, batch: int, exact: bool) -> Split | None:
    """The fastest shares where each group accumulates as often as it likes (DDP and ZeRO-1 meet once a step).

    Args:
        sizes: micro-batches considered, samples.
        a, b: the groups.
        samples: to train on.
        batch: the global batch; where it is not ``exact``, the largest one allowed: each pair of micro-batches then
            comes as near to it as whole micro-batches can.
        exact: whether the global batch must be ``batch``.

    Returns:
        The split that takes least time for all samples, or None where no shares add up.
    """
    i, j = np.nonzero(np.isfinite(a.once)[:, None] & np.isfinite(b.once)[None, :])
    of_a, of_b = a.ranks * sizes[i], b.ranks * sizes[j]
    small = of_a + of_b <= batch
    i, j, of_a, of_b = i[small], j[small], of_a[small], of_b[small]
    common = np.gcd(of_a, of_b)
    whole = batch - batch % common
    # All solutions: k_a = first + n period, and k_b falls by of_a / common with each n. Both are at least 1.
    period = of_b // common
    first = whole // common % period * _inverse(of_a // common, period) % period
    first = np.where(first == 0, period, first)
    most = (whole - of_b) // of_a
    legal = first <= most
    if exact:
        legal &= whole == batch
    i, j, of_a, of_b, whole, period, first, most = (
        array[legal] for array in (i, j, of_a, of_b, whole, period, first, most)
    )
    if not i.size:
        return None
    last = most - (most - first) % period
    # Balance: k_a each_a = k_b each_b. Where accumulating never fits, only the ends can be solutions.
    with np.errstate(invalid="ignore"):
        balance = whole * b.each[j] / (of_b * a.each[i] + of_a * b.each[j])
    balance = np.where(np.isfinite(balance), balance, first)
    below = first + np.floor((balance - first) / period).astype(np.int64) * period
    k_a = np.stack([first, last, np.clip(below, first, last), np.clip(below + period, first, last)])
    k_b = (whole - of_a * k_a) // of_b
    with np.errstate(invalid="ignore"):
        seconds = np.maximum(
            np.where(k_a == 1, a.once[i], k_a * a.each[i]), np.where(k_b == 1, b.once[j], k_b * b.each[j])
        )
    steps = -(-samples // whole)
    n, at = divmod(int(np.argmin(steps * seconds)), i.size)
    if not np.isfinite(seconds[n, at]):
        return None
    return Split(
        size=(int(i[at]), int(j[at])),
        grad_accum=(int(k_a[n, at]), int(k_b[n, at])),
        global_batch=int(whole[at]),
        steps=int(steps[at]),
        seconds=float(seconds[n, at]),
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


def split_in_step(sizes: Ints, a: Rates, b: Rates, samples: int, batch: int, exact: bool) -> Split | None:
    """The fastest shares where all ranks run the same number of micro-batches (ZeRO-2 and 3 meet in every one).

    Arguments and result are those of ``split_freely``.
    """
    together = a.ranks * sizes[:, None] + b.ranks * sizes[None, :]
    accum = batch // together
    legal = (accum * together == batch) if exact else (accum >= 1)
    once = np.maximum(a.once[:, None], b.once[None, :])
    each = np.maximum(a.each[:, None], b.each[None, :])
    count = np.maximum(accum, 1)
    seconds = np.where(count == 1, once, count * each)
    steps = -(-samples // (count * together))
    total = np.where(legal, steps * seconds, np.inf)
    i, j = divmod(int(np.argmin(total)), sizes.size)
    if not np.isfinite(total[i, j]):
        return None
    k = int(accum[i, j])
    return Split(
        size=(i, j),
        grad_accum=(k, k),
        global_batch=k * int(together[i, j]),
        steps=int(steps[i, j]),
        seconds=float(seconds[i, j]),
    )
