"""Output of a worker with its rank before each line, for the node's log stream and ``gpufleet logs --rank``."""

from __future__ import annotations

import os
import re
import select
import threading
import time

STANDARD_ERROR = 2
# A progress bar ends its states with a carriage return, and may have no line feed for hours.
LINE_END = re.compile(rb"\r?\n|\r")
# Longer lines are split: older CloudWatch agents cut 256 KB (https://github.com/aws/amazon-cloudwatch-agent/pull/1762).
LINE_BYTES = 48 * 2**10
# A line without an end is passed on after this time: a bar's last state, dots, a prompt.
QUIET_S = 5.0
# Wait for the last lines of ended workers; a process that they left behind may keep the pipe open for ever.
LAST_LINES_S = 2.0
_threads: list[threading.Thread] = []
# A pipe takes long lines in pieces.
_writing = threading.Lock()


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
        _threads[:] = [thread for thread in _threads if thread.is_alive()] + [thread]

    def __enter__(self) -> RankLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()

    def _copy(self, read_end: int) -> None:
        rest, is_begun = b"", False
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while True:
                if rest and not select.select([pipe], [], [], QUIET_S)[0]:
                    self._write([rest])
                    rest, is_begun = b"", True
                if not (data := pipe.read(LINE_BYTES)):
                    break
                *lines, rest = LINE_END.split(rest + data)
                if is_begun and lines and not lines[0]:  # the end of what was passed on
                    del lines[0]
                is_begun = False
                if len(rest) >= LINE_BYTES:
                    lines.append(rest[:LINE_BYTES])
                    rest = rest[LINE_BYTES:]
                self._write(lines)
        if rest:
            self._write([rest])

    def _write(self, lines: list[bytes]) -> None:
        mark = f"[rank {self.rank}] ".encode() if self.rank else b""
        pieces = [line[start : start + LINE_BYTES] for line in lines for start in range(0, len(line) or 1, LINE_BYTES)]
        data = b"".join(mark + piece + b"\n" for piece in pieces)
        with _writing:
            while data:
                data = data[os.write(STANDARD_ERROR, data) :]


def flush() -> None:
    """Wait for the last lines of processes that have ended."""
    until = time.monotonic() + LAST_LINES_S
    for thread in _threads:
        thread.join(max(0.0, until - time.monotonic()))
