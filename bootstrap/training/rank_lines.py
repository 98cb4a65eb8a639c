"""Output of a worker with its rank before each line, where the node's journal cannot tell workers apart.

In a container docker's client writes all lines (agent/container.py), so there is no process to know a rank by
(../logs/ranks.py); in a pod nobody reads a journal.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

VARIABLE = "GPUFLEET_RANK_LINES"
STANDARD_ERROR = 2
# The journal splits longer lines: LineMax= of journald.conf(5).
LINE_BYTES = 48 * 2**10
# For the last lines of workers that have ended; what they left behind may hold the pipe for ever.
LAST_LINES_S = 2.0
_threads: list[threading.Thread] = []
# A pipe takes long lines in pieces.
_writing = threading.Lock()


def are_wanted(arguments: Sequence[str]) -> bool:
    """Tell whether torchrun, with these arguments, marks lines. Ranks of a program are its own launcher's."""
    return os.environ.get(VARIABLE) == "1" and "bootstrap.launchers" not in arguments


class RankLines:
    """Pipe whose ``end`` is for a process's output; leave the ``with`` block once the process has it.

    A thread copies each line to standard error, after ``[rank N] `` where ``rank`` is set.
    """

    def __init__(self, rank: str = "") -> None:
        self.rank = rank
        read_end, write_end = os.pipe()
        self.end = os.fdopen(write_end, "w")
        thread = threading.Thread(target=self._copy, args=(read_end,), name="rank-lines", daemon=True)
        thread.start()
        _threads[:] = [one for one in _threads if one.is_alive()] + [thread]

    def __enter__(self) -> RankLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def _copy(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb") as pipe:
            while line := pipe.readline(LINE_BYTES):
                mark = f"[rank {self.rank}] " if self.rank else ""
                _write(mark.encode() + line.removesuffix(b"\n") + b"\n")


def _write(data: bytes) -> None:
    with _writing:
        while data:
            data = data[os.write(STANDARD_ERROR, data) :]


def flush() -> None:
    """Wait for the last lines of processes that have ended."""
    until = time.monotonic() + LAST_LINES_S
    for thread in _threads:
        thread.join(max(0.0, until - time.monotonic()))
