"""GPU rank of a line, from the process that wrote it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

# Written by bootstrap/training/torchrun.py before a worker can write anything.
_STARTED = re.compile(r" torchrun rank (\d+) is process (\d+)$")
# A day's restarts; without an end, a node of workers would remember every process.
KEPT = 10_000


class Ranks:
    """Ranks of the training's processes, also of those that have ended."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._by_process: dict[str, str] = {}

    def prefixed(self, text: str, process: str) -> str:
        """Put ``[rank N] `` before what a worker, or a process of its own, wrote; other lines stay as they are."""
        if (started := _STARTED.search(text)) is not None:
            self._remember(started[2], started[1])
            return text
        if process not in self._by_process:
            self._remember(process, self._inherited(process))
        rank = self._by_process[process]
        return f"[rank {rank}] {text}" if rank else text

    def _remember(self, process: str, rank: str) -> None:
        self._by_process.pop(process, None)
        self._by_process[process] = rank
        if len(self._by_process) > KEPT:
            del self._by_process[next(iter(self._by_process))]

    def _inherited(self, process: str) -> str:
        """RANK of a process that still runs: a worker of before this service's start, or a child of one."""
        with suppress(OSError):
            variables = (self._proc / process / "environ").read_bytes().split(b"\0")
            return next((value.decode() for name, _, value in (one.partition(b"=") for one in variables)
                         if name == b"RANK" and value.isdigit()), "")  # fmt: skip
        return ""
