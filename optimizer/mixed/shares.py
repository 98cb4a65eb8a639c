"""How two groups of unequal ranks share a global batch so that the slower one is as fast as possible, in whole numbers.

A rank of group i runs k_i micro-batches of m_i samples and takes k_i t_i(m_i) seconds. Sought are m and k that minimise
the larger of the two times while the ranks' samples add up to the global batch: R_a m_a k_a + R_b m_b k_b = G.

For one pair of micro-batches that is a linear Diophantine equation: along its solutions one time rises and the other
falls, so the best is one of the two solutions around the balance point, or an end (a single micro-batch costs no
accumulation, and its time is off the line). Over pairs of micro-batches, the least time that fractions would allow
bounds the whole, so only pairs that can still win are looked at. Both steps are exact; tests compare with brute force.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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

    def seconds(self, size: int, accumulated: int) -> float:
        """Time of a step of ``accumulated`` micro-batches of the size at place ``size``."""
        return float(self.once[size] if accumulated == 1 else accumulated * self.each[size])


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


def split_freely(sizes: NDArray[np.int64], a: Rates, b: Rates, samples: int, batch: int, exact: bool) -> Split | None:
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
    best: Split | None = None
    best_total = math.inf
    # Perfect balance of fractional micro-batches: all ranks busy all the time.
    with np.errstate(divide="ignore"):
        bound = samples / ((a.ranks * sizes / a.once)[:, None] + (b.ranks * sizes / b.once)[None, :])
    bound[~(np.isfinite(a.once)[:, None] & np.isfinite(b.once)[None, :])] = np.inf
    for place in np.argsort(bound, axis=None, kind="stable"):
        i, j = divmod(int(place), sizes.size)
        if bound[i, j] >= best_total:
            break
        for accum, global_batch in _solutions(int(sizes[i]), int(sizes[j]), i, j, a, b, batch, exact):
            seconds = max(a.seconds(i, accum[0]), b.seconds(j, accum[1]))
            steps = -(-samples // global_batch)
            if steps * seconds < best_total:
                best_total = steps * seconds
                best = Split(size=(i, j), grad_accum=accum, global_batch=global_batch, steps=steps, seconds=seconds)
    return best


def _solutions(
    m_a: int, m_b: int, i: int, j: int, a: Rates, b: Rates, batch: int, exact: bool
) -> list[tuple[tuple[int, int], int]]:
    """The accumulations that can be best for one pair of micro-batches, each with its global batch."""
    of_a, of_b = a.ranks * m_a, b.ranks * m_b
    common = math.gcd(of_a, of_b)
    left = batch % common
    if left and exact:
        return []
    batch -= left
    # All solutions: k_a = first + n period, and k_b falls by of_a / common with each n.
    period = of_b // common
    first = batch // common * pow(of_a // common, -1, period) % period if period > 1 else 1
    first = first or period
    most = (batch - of_b) // of_a  # k_b >= 1
    if first > most:
        return []
    last = most - (most - first) % period
    # Balance: k_a each_a = k_b each_b with k_b = (batch - of_a k_a) / of_b. Not finite where accumulating never fits.
    each_a, each_b = float(a.each[i]), float(b.each[j])
    at = {first, last}
    if math.isfinite(each_a) and math.isfinite(each_b):
        balance = batch * each_b / (of_b * each_a + of_a * each_b)
        below = first + math.floor((balance - first) / period) * period
        at |= {min(max(k, first), last) for k in (below, below + period)}
    return [((k, (batch - of_a * k) // of_b), batch) for k in sorted(at)]


def split_in_step(sizes: NDArray[np.int64], a: Rates, b: Rates, samples: int, batch: int, exact: bool) -> Split | None:
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
    if not math.isfinite(total[i, j]):
        return None
    k = int(accum[i, j])
    return Split(
        size=(i, j),
        grad_accum=(k, k),
        global_batch=k * int(together[i, j]),
        steps=int(steps[i, j]),
        seconds=float(seconds[i, j]),
    )
