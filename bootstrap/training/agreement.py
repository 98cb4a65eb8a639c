"""Agreement of all ranks after a step: the largest value of each flag over the ranks.

The exchange runs while the next step does and is acted on after it, so that no rank waits; where steps take a second
or more, a notice would wait too long, and the ranks exchange before they go on. Of short steps not each has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bootstrap.training.rank_group import RankGroup

# A step that is slower than this exchanges its flags at once: 0.6 ms of it are less than 0.1%.
OVERLAP_BELOW_MS = 1000
# An exchange costs 0.4 ms of host time, so one in this time costs 0.16%; and a notice waits at most ten steps, should
# they become slow.
INTERVAL_MS = 250
MOST_STEPS = 10


@dataclass
class Agreement:
    """Exchange of ``flags``, after ``every`` steps where given; every rank calls both methods after each step."""

    ranks: RankGroup
    flags: Callable[[], tuple[int, ...]]
    every: int | None
    _pending: Callable[[], list[int]] | None = None
    _overlaps: bool = False
    _last: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _cadence: int = 1

    def __post_init__(self) -> None:
        self._cadence = self.every or 1

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
        if not now and self._steps % self._cadence:
            return None
        step_ms = int((time.monotonic() - self._last) * 1000 / self._cadence)
        self._last = time.monotonic()
        if now or not self._overlaps:
            return self._agreed(self.ranks.maximum(*self.flags(), step_ms))
        self._pending = self.ranks.start_maximum(*self.flags(), step_ms)
        return None

    def _agreed(self, values: list[int]) -> list[int]:
        *flags, slowest_ms = values
        # The same on all ranks, which therefore go on in the same way. One process alone has nobody to wait for.
        self._overlaps = self.ranks.world_size > 1 and slowest_ms < OVERLAP_BELOW_MS
        if self.every is None:
            steps = min(MOST_STEPS, INTERVAL_MS // max(1, slowest_ms))
            self._cadence = max(1, steps) if self._overlaps else 1
        return flags
