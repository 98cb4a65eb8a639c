"""Batch split: the micro-batches that let two unlike node groups finish a step together, in whole numbers.

Each rank of a group runs k micro-batches of m samples. A step takes the longer computation of the two groups and the
longer exposed communication. Every combination of whole numbers is tried: there are few, and the arrays are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTimes:
    """Seconds of one rank of a node group; arrays over its settings.

    Attributes:
        ranks: of the group.
        micro_batch: samples.
        first_s, further_s: computation of the first micro-batch of a step, and of each further one; ``first_s`` is
            infinite where the setting does not fit, ``further_s`` where only one micro-batch fits.
        first_exposed_s, further_exposed_s: exposed communication, likewise; finite.
    """

    ranks: int
    micro_batch: Ints
    first_s: Floats
    further_s: Floats
    first_exposed_s: Floats
    further_exposed_s: Floats

    def computed_s(self, setting: Ints, grad_accum: Ints) -> Floats:
        """Computation of a step; infinite where it does not fit."""
        with np.errstate(invalid="ignore"):
            further = np.where(grad_accum > 1, (grad_accum - 1) * self.further_s[setting], 0.0)
        return np.asarray(self.first_s[setting] + further)

    def exposed_s(self, setting: Ints, grad_accum: Ints) -> Floats:
        """Exposed communication of a step."""
        return np.asarray(self.first_exposed_s[setting] + (grad_accum - 1) * self.further_exposed_s[setting])


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSplit:
    """The chosen setting and gradient accumulation of each group, and the seconds of one step."""

    setting: tuple[int, int]
    grad_accum: tuple[int, int]
    step_time_s: float


def split_batch(a: GroupTimes, b: GroupTimes, *, batch: int, in_step: bool) -> BatchSplit | None:
    """Find the split of the shortest step; None where no whole numbers add up to the batch.

    Args:
        a, b: the groups.
        batch: samples of a step.
        in_step: whether the groups communicate in every micro-batch (ZeRO-2 and 3), so that both run as many.
    """
    usable_a, usable_b = (np.flatnonzero(np.isfinite(group.first_s)) for group in (a, b))
    most = np.where(np.isfinite(a.further_s), (batch - b.ranks) // (a.ranks * a.micro_batch), 1)[usable_a]
    # Rows: a setting of group a with each of its accumulations. Columns: a setting of group b.
    setting_a = np.repeat(usable_a, np.maximum(most, 0))[:, None]
    accum_a = np.concatenate([np.arange(1, n + 1) for n in most.tolist()] or [np.zeros(0)]).astype(np.int64)[:, None]
    samples_a = a.ranks * a.micro_batch[setting_a]
    samples_b = (b.ranks * b.micro_batch)[usable_b]
    if in_step:
        accum_b = np.where(accum_a == batch // (samples_a + samples_b), accum_a, 0)
    else:
        accum_b = (batch - samples_a * accum_a) // samples_b
    row, column = np.nonzero((accum_b >= 1) & (samples_a * accum_a + samples_b * accum_b == batch))
    if not row.size:
        return None
    setting_a, setting_b = setting_a[row, 0], usable_b[column]
    accum_a, accum_b = accum_a[row, 0], accum_b[row, column]
    computed_s = np.maximum(a.computed_s(setting_a, accum_a), b.computed_s(setting_b, accum_b))
    step_s = computed_s + np.maximum(a.exposed_s(setting_a, accum_a), b.exposed_s(setting_b, accum_b))
    best = int(step_s.argmin())
    if not np.isfinite(step_s[best]):
        return None
    return BatchSplit(
        setting=(int(setting_a[best]), int(setting_b[best])),
        grad_accum=(int(accum_a[best]), int(accum_b[best])),
        step_time_s=float(step_s[best]),
    )
