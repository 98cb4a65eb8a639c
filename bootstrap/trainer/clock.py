"""Step times by events of the device, so that measuring waits for nothing."""

from __future__ import annotations

import time
from array import array
from collections import deque

import torch


class StepClock:
    """Durations of steps, complete up to the step that the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: deque[torch.cuda.Event | None] = deque()
        self._last_s = 0.0
        self._started = False
        self.durations_s = array("d")
        """Seconds of each step so far, oldest first."""

    def restart(self) -> None:
        """Leave what happened since the last step out: an evaluation, a resume."""
        self._started = False
        self.tick()

    def tick(self) -> None:
        """Mark the end of a step, and with ``restart`` the beginning of the first."""
        if self.device.type != "cuda":
            now = time.perf_counter()
            if self._started:
                self.durations_s.append(now - self._last_s)
            self._last_s, self._started = now, True
            return
        if not self._started and self._marks:
            self._marks.append(None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)
        self._started = True
        self._collect()

    def synchronize(self) -> None:
        """Wait for the device and complete ``durations_s``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._collect()

    def _collect(self) -> None:
        while len(self._marks) > 1:
            first, second = self._marks[0], self._marks[1]
            if first is not None and second is not None:
                if not second.query():  # type: ignore[no-untyped-call]
                    return
                self.durations_s.append(first.elapsed_time(second) / 1000)
            self._marks.popleft()
