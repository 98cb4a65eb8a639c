"""Ends a process that stopped making progress: waiting for a dead peer would otherwise go on, paid, forever."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from bootstrap.training.errors import EXIT_HUNG


class Heartbeat:
    """Exits the process with ``EXIT_HUNG`` when no beat comes within the limit set by the last one.

    A thread can do this while the main thread is stuck inside a collective, where no Python signal handler runs.
    The stacks of all threads go to stderr first.
    """

    def __init__(self) -> None:
        self._deadline = float("inf")
        self._limit_s = 0.0
        self._doing = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, *, limit_s: float, doing: str) -> None:
        """Alive; the next beat must come within ``limit_s``."""
        self._limit_s, self._doing = limit_s, doing
        self._deadline = time.monotonic() + limit_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """No more beats are expected."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(min(1.0, max(0.05, self._limit_s / 10))):
            if time.monotonic() > self._deadline:
                # os.write and os._exit: nothing here may wait for a lock that the stuck thread holds.
                rank = os.environ.get("RANK", "0")
                text = f"rank {rank}: no progress for {self._limit_s:g} s in {self._doing}; exiting so it can restart\n"
                os.write(2, text.encode())
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                os._exit(EXIT_HUNG)
