"""Watch over a test of many hosts: it ends in time on every host, and tells which host does not answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import progress

BEAT_S = 0.5
# Two counts of the ranks' beats so far apart tell who is silent.
ROLL_CALL_S = 3.0
# A rank that failed still beats for so long, so that the roll calls of others, who learn of it a beat later, count it.
LINGER_S = ROLL_CALL_S + 2 * BEAT_S
# A step of the test without an end for so long hangs: the longest, a collective of all sizes, takes up to 9 s.
STEP_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Silent ranks, the faults that ranks reported of themselves, and the step in which a rank hangs."""

    silent: tuple[int, ...]
    faults: dict[int, str]
    hung: str = ""


class Watch:
    """Beats for this rank, and calls ``report`` once where a rank fails, falls silent, or the time is over.

    Two threads: requests to a store whose host vanished never return, and the clock must go on.
    """

    def __init__(self, ranks: Ranks, *, limit_s: float, report: Callable[[str, Loss], None]) -> None:
        self._ranks, self._report = ranks, report
        # The main thread may hold its own connection for as long as it waits.
        self._store = ranks.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self.step("start")
        self._done = threading.Event()
        self._failing = threading.Lock()
        for work in (self._beat, self._look_at_clock):
            threading.Thread(target=work, daemon=True).start()

    def step(self, name: str, limit_s: float | None = None) -> None:
        """Say that the test goes on, with this step of at most ``limit_s``, STEP_S by default."""
        limit_s = limit_s or STEP_S
        self._step, self._step_s, self._step_ends = name, limit_s, time.monotonic() + limit_s

    def stop(self) -> None:
        """End the watch: the test is done."""
        self._done.set()

    def fail(self, reason: str, *, own: bool, hung: str = "") -> NoReturn:
        """Tell all ranks, find the silent ones, report and exit with 1; ``own`` where the fault is this rank's."""
        if self._failing.acquire(blocking=False):
            progress(f"rank {self._ranks.rank}: {reason}; asking who still answers")
            self._report(reason, self._roll_call(reason if own else None, hung))
            # The store may live in rank 0: it leaves last.
            time.sleep(LINGER_S if self._ranks.rank else 2 * LINGER_S)
            # Not sys.exit: destructors of a broken NCCL communicator can hang.
            os._exit(1)
        while True:  # another thread reports, and ends this process
            time.sleep(1)

    def _beat(self) -> None:
        has_failed = False
        try:
            while not self._done.wait(BEAT_S):
                self._store.add(f"beat/{self._ranks.rank}", 1)
                if not has_failed and self._store.add("failures", 0):
                    has_failed = True
                    # In another thread, as this one goes on beating.
                    report = partial(self.fail, "another rank failed", own=False)
                    threading.Thread(target=report, daemon=True).start()
        except RuntimeError:  # torch raises DistNetworkError, a RuntimeError
            if not self._done.is_set():
                self.fail("the store of rank 0 is gone", own=False)

    def _look_at_clock(self) -> None:
        while not self._done.wait(BEAT_S):
            now = time.monotonic()
            if now > self._deadline:
                self.fail(f"the time limit of {self._limit_s:g} s is over, in {self._step!r}", own=False)
            if now > self._step_ends:
                self.fail(f"no end of {self._step!r} within {self._step_s:g} s", own=False, hung=self._step)

    def _roll_call(self, fault: str | None, hung: str) -> Loss:
        try:
            return ThreadPoolExecutor(1).submit(self._ask, fault, hung).result(ROLL_CALL_S + 2)
        except (TimeoutError, RuntimeError):  # the store of rank 0 does not answer, or is gone
            own = {self._ranks.rank: fault} if fault else {}
            return Loss(silent=(0,) if self._ranks.rank else (), faults=own)

    def _ask(self, fault: str | None, hung: str) -> Loss:
        store = self._ranks.store.clone()  # type: ignore[attr-defined]
        if fault:
            store.set(f"fault/{self._ranks.rank}", fault)
        if hung:
            # Before the failure, upon which the other ranks look for it.
            store.set("hung", hung)
        store.add("failures", 1)
        counts = self._counts(store)
        time.sleep(ROLL_CALL_S)
        silent = [rank for rank, count in enumerate(self._counts(store)) if count == counts[rank]]
        told = [rank for rank in range(self._ranks.world_size) if store.check([f"fault/{rank}"])]
        return Loss(
            silent=tuple(rank for rank in silent if rank != self._ranks.rank),
            faults={rank: str(store.get(f"fault/{rank}"), "utf-8") for rank in told},
            hung=str(store.get("hung"), "utf-8") if store.check(["hung"]) else "",
        )

    def _counts(self, store: Any) -> Sequence[int]:
        return [store.add(f"beat/{rank}", 0) for rank in range(self._ranks.world_size)]
