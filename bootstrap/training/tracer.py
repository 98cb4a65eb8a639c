"""Profiler traces on demand (contract/trace.py): a few steps of one rank by torch.profiler, into the store.

A thread of each rank looks for a request. No rank waits for another, and nothing here ends the training.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bootstrap.contract.trace import FOLDER, MAX_AGE, POLL_S, REQUEST, TraceRequest, read_trace_request
from bootstrap.training.errors import AlreadyExistsError
from bootstrap.training.notices import DRAIN_FILE_VARIABLE
from bootstrap.training.stores import Store

logger = logging.getLogger(__name__)

# For the last trace of a run that ends.
LAST_WRITE_S = 60.0


class Tracer:
    """Traces this rank when it is asked to; without the agent never."""

    def __init__(self, store: Store, *, rank: int, poll_s: float = POLL_S) -> None:
        self._store, self._rank, self._poll_s = store, rank, poll_s
        self._request: TraceRequest | None = None  # to carry out
        self._taking: TraceRequest | None = None
        self._profile: Any = None  # torch has no types for it
        self._mark: Any = None
        self._ends_at = 0
        self._writer: threading.Thread | None = None
        self._closing = threading.Event()

    def start(self) -> None:
        """Look for requests from now on."""
        if os.environ.get(DRAIN_FILE_VARIABLE):
            threading.Thread(target=self._look, name="trace-requests", daemon=True).start()

    def before_step(self, step: int) -> None:
        """Begin or end a trace; ``step`` is about to begin."""
        if self._profile is not None:
            self._mark.__exit__(None, None, None)
            if step >= self._ends_at:
                self._finish()
                return
        else:
            request, self._request = self._request, None
            if request is None or not self._begin(request, step):
                return
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def close(self, *, in_order: bool) -> None:
        """Write a trace that is being taken; a run that is interrupted has no time for it."""
        self._closing.set()
        if not in_order:
            return
        if self._profile is not None:
            self._mark.__exit__(None, None, None)
            self._finish()
        if self._writer is not None:
            self._writer.join(LAST_WRITE_S)

    def _begin(self, request: TraceRequest, step: int) -> bool:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            started = profile(activities=activities, record_shapes=True, acc_events=True)
            started.start()
        except Exception as error:  # noqa: BLE001 - the training's own profiler may run
            self._answer(request, None, f"torch.profiler does not start: {type(error).__name__}: {error}")
            return False
        self._profile, self._taking, self._ends_at = started, request, step + request.steps
        logger.info("tracing %d steps from step %d, asked for by %s", request.steps, step, request.by)
        return True

    def _finish(self) -> None:
        request, taken, self._profile = self._taking, self._profile, None
        assert request is not None
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # kernels of the last step
            taken.stop()
        except Exception as error:  # noqa: BLE001
            self._answer(request, None, f"torch.profiler does not stop: {type(error).__name__}: {error}")
        else:
            self._answer(request, taken)

    def _answer(self, request: TraceRequest, taken: Any, problem: str = "") -> None:
        """Write the trace, or why there is none, in the background."""

        def write() -> None:
            name, content = request.failure, f"{problem}\n".encode()
            try:
                if taken is not None:
                    with tempfile.TemporaryDirectory() as folder:
                        path = Path(folder) / "trace.json.gz"
                        taken.export_chrome_trace(str(path))
                        name, content = request.trace, path.read_bytes()
                with suppress(AlreadyExistsError):  # workers of several nodes have the same ranks
                    self._store.write(name, [content])
                logger.info("answer of rank %d: %s/%s %s", self._rank, self._store.uri, name, problem)
            except Exception:
                logger.exception("%s/%s cannot be written", self._store.uri, name)

        self._writer = threading.Thread(target=write, name="trace-writer", daemon=True)
        self._writer.start()

    def _look(self) -> None:
        seen, problem = "", ""
        while not self._closing.is_set():
            try:
                seen = self._look_once(seen)
                problem = ""
            except FileNotFoundError:
                pass
            except Exception as error:  # noqa: BLE001 - no permission, no network: training goes on without traces
                if (text := f"{type(error).__name__}: {error}") != problem:
                    logger.warning("requests for traces cannot be read: %s", text)
                    problem = text
            self._closing.wait(self._poll_s)

    def _look_once(self, seen: str) -> str:
        """Take a new request for this rank; returns the id of the newest."""
        request = read_trace_request(self._store.read(REQUEST).decode(), f"{self._store.uri}/{REQUEST}")
        is_new = request.id != seen and request.rank == self._rank and datetime.now(UTC) - request.at < MAX_AGE
        if is_new and not self._store.names(f"{FOLDER}/{request.id}/"):
            self._request = request
        return request.id
