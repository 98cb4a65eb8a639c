"""Agreement of all ranks after a step: the largest value of each flag over the ranks, about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bootstrap.training.rank_group import RankGroup

# An exchange costs 0.4 to 0.6 ms of host time, so one in this time costs 0.06%; and a notice waits at most ten steps,
# should they become slow.
INTERVAL_MS = 1000
# While a checkpoint waits for all ranks' word that their files are written, and then the manifest.
SAVING_INTERVAL_MS = 250
MOST_STEPS = 10


@dataclass
class Agreement:
    """Exchange of ``flags``, after ``every`` steps where given; every rank asks after each step.

    ``saving``: a checkpoint is pending, at the same steps on every rank.
    """

    ranks: RankGroup
    flags: Callable[[], tuple[int, ...]]
    every: int | None
    saving: Callable[[], bool] = lambda: False
    _last: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _slowest_ms: int = INTERVAL_MS

    def exchange(self, *, now: bool) -> list[int] | None:
        """Agreed values of the flags; None where no exchange is due. ``now``: in any case."""
        self._steps += 1
        if not now and self._steps < self._cadence():
            return None
        step_ms = int((time.monotonic() - self._last) * 1000 / self._steps)
        # The same on all ranks, which therefore go on in the same way.
        *flags, self._slowest_ms = self.ranks.maximum(*self.flags(), step_ms)
        self._last, self._steps = time.monotonic(), 0
        return flags

    def _cadence(self) -> int:
        """Steps between two exchanges, the same on all ranks. One process alone has nobody to wait for."""
        if self.every is not None or self.ranks.world_size == 1:
            return self.every or 1
        interval_ms = SAVING_INTERVAL_MS if self.saving() else INTERVAL_MS
        return max(1, min(MOST_STEPS, interval_ms // max(1, self._slowest_ms)))
