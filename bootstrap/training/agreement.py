"""Agreement of all ranks after a step: the largest value of each flag over the ranks.

The exchange runs while the next step does and is acted on after it, so that no rank waits; where steps take a second
or more, a notice would wait too long, and the ranks exchange before they go on. Of short steps not each has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bootstrap.training.rank_group import RankGroup

# Slower steps exchange their flags without overlap: the 0.6 ms that it takes are less than 0.1% of such a step.
OVERLAP_BELOW_MS = 1000
# An exchange costs 0.4 ms of host time, so one in this time costs 0.04%; and a notice waits at most ten steps, should
# they become slow.
INTERVAL_MS = 1000
# While a checkpoint waits for all ranks' word that their files are written, and then the manifest.
SAVING_INTERVAL_MS = 250
MOST_STEPS = 10


@dataclass
class Agreement:
    """Exchange of ``flags``, after ``every`` steps where given; every rank calls both methods after each step.

    ``saving``: a checkpoint is pending, at the same steps on every rank.
    """

    ranks: RankGroup
    flags: Callable[[], tuple[int, ...]]
    every: int | None
    saving: Callable[[], bool] = lambda: False
    _pending: Callable[[], list[int]] | None = None
    _overlaps: bool = False
    _last: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _slowest_ms: int = OVERLAP_BELOW_MS

    def finish(self) -> list[int] | None:
        """Flags of the exchange that ran during the step; None where none did."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return self._agreed(pending())

    def exchange(self, *, now: bool) -> list[int] | None:
        """Exchange the flags as they are: their agreed values, or None where ``finish`` will give them or none is due.

        ``now``: in any case, and at once.
        """
        self._steps += 1
        if not now and self._steps < self._cadence():
            return None
        step_ms = int((time.monotonic() - self._last) * 1000 / self._steps)
        self._last, self._steps = time.monotonic(), 0
        if now or not self._overlaps:
            return self._agreed(self.ranks.maximum(*self.flags(), step_ms))
        self._pending = self.ranks.start_maximum(*self.flags(), step_ms)
        return None

    def _agreed(self, values: list[int]) -> list[int]:
        # The same on all ranks, which therefore go on in the same way. One process alone has nobody to wait for.
        *flags, self._slowest_ms = values
        self._overlaps = self.ranks.world_size > 1 and self._slowest_ms < OVERLAP_BELOW_MS
        return flags

    def _cadence(self) -> int:
        """Steps between two exchanges, the same on all ranks."""
        if self.every is not None:
            return self.every
        interval_ms = SAVING_INTERVAL_MS if self.saving() else INTERVAL_MS
        return max(1, min(MOST_STEPS, interval_ms // max(1, self._slowest_ms))) if self._overlaps else 1
