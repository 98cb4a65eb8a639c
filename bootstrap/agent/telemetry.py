"""The job's speed for the CloudWatch agent (../cloudwatch-agent.json), and a limit for the output that it sends."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from pathlib import Path

from bootstrap.agent.commands import output_of

STATSD = ("127.0.0.1", 8125)
INTERVAL_S = 60.0
# Disk space of the output; the CloudWatch agent is at most this far behind.
LOG_BYTES = 2**30


class Telemetry:
    """Work that a node does once a minute while it trains; whatever fails in it stops nothing."""

    def __init__(self, progress_file: Path, log_file: Path) -> None:
        self._progress_file, self._log_file = progress_file, log_file
        self._last: tuple[float, float] | None = None
        self._next_at = time.monotonic() + INTERVAL_S

    def tick(self) -> None:
        """Do the work where a minute is over."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + INTERVAL_S
        if (speed := self.tokens_per_second()) is not None:
            with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as client:
                client.sendto(f"TokensPerSecond:{speed:.6g}|g".encode(), STATSD)
        shorten(self._log_file)

    def tokens_per_second(self) -> float | None:
        """Rate of whole steps since the last call, from the progress file, which rank 0's node has.

        None without a new step, or with unknown tokens (format: training/progress.py).
        """
        try:
            document = json.loads(self._progress_file.read_text(encoding="utf-8"))
            at, tokens = float(document["at"]), float(document["tokens"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        last, self._last = self._last, (at, tokens)
        # Fewer tokens than before: training went back to a checkpoint, and lost steps are no speed.
        if last is None or at <= last[0] or tokens < last[1]:
            return None
        return (tokens - last[1]) / (at - last[0])


def shorten(log_file: Path) -> None:
    """Free the older part of a file that takes twice ``LOG_BYTES``; readers keep their place, as its size stays."""
    with suppress(OSError):
        status = log_file.stat()
        if status.st_blocks * 512 > 2 * LOG_BYTES:
            # https://man7.org/linux/man-pages/man1/fallocate.1.html
            hole = ["--punch-hole", "--offset", "0", "--length", str(status.st_size - LOG_BYTES)]
            output_of(["fallocate", *hole, str(log_file)], 60.0)
