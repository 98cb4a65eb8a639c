"""End of a run on a notice; end of a process: in order, without progress, or after its torchrun."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from bootstrap.training.errors import EXIT_HUNG, Interrupted
from bootstrap.training.ledger import Ledger
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)


def leave_together(ranks: RankGroup, ledger: Ledger, watcher: Watcher, *, step: int, is_saved: bool) -> Interrupted:
    """Tell ledger and node that the run stops after ``step``, and close ``ranks``; every rank raises the result."""
    reason = next(filter(None, ranks.gather(str(watcher.stop_notice or ""))), "a notice")
    interrupted = Interrupted(reason=reason, step=step, saved=is_saved)
    if ranks.rank == 0:
        logger.warning("%s", interrupted)
    ledger.end("stop", step, reason)
    # Rank 0 writes the ledger first: torchrun ends all ranks when one exits.
    ranks.maximum(0)
    if ranks.local_rank == 0:
        watcher.announce_saved()
    ranks.close()
    return interrupted


def end_process(code: int) -> NoReturn:
    """Exit without Python's shutdown, for a script whose last lines use gloo (``RankGroup.close`` says why)."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class Heartbeat:
    """Exits with ``EXIT_HUNG``, after all threads' stacks, when a beat is overdue or torchrun is gone.

    A thread, because no signal handler runs while the main thread is stuck in a collective.
    """

    def __init__(self) -> None:
        self._deadline = float("inf")
        self._limit_s = 0.0
        self._doing = ""
        self._torchrun_pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, *, limit_s: float, doing: str) -> None:
        """Report progress; the next beat must come within ``limit_s``."""
        self._limit_s, self._doing = limit_s, doing
        self._deadline = time.monotonic() + limit_s
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Expect no more beats."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(min(1.0, max(0.05, self._limit_s / 10))):
            if self._torchrun_pid is not None and os.getppid() != self._torchrun_pid:
                _exit_now("torchrun is gone; exiting before another one starts this run again")
            if time.monotonic() > self._deadline:
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                _exit_now(
                    f"no progress for {self._limit_s:g} s in {self._doing}; exiting so that it can start again. Where "
                    "it went on (an evaluation): run.goes_on() within it, or a longer GPUFLEET_HANG_TIMEOUT_S"
                )


def _exit_now(reason: str) -> NoReturn:
    # Without a lock that a stuck thread may hold.
    with suppress(OSError):  # torchrun reads the output (rank_lines.py), and may be gone
        os.write(2, f"rank {os.environ.get('RANK', '0')}: {reason}\n".encode())
    os._exit(EXIT_HUNG)
