"""Profiler traces on demand (contract/trace.py): a few steps of one rank by torch.profiler, into the store.

On each node local rank 0 looks for a request in the store; the other ranks read it from a file beside the notices. No
rank waits for another, and nothing here ends the training.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bootstrap.contract.codec import FormatError
from bootstrap.contract.trace import FOLDER, MAX_AGE, POLL_S, REQUEST, TraceRequest, read_trace_request
from bootstrap.training.errors import AlreadyExistsError
from bootstrap.training.notices import DRAIN_FILE_VARIABLE
from bootstrap.training.stores import Store

logger = logging.getLogger(__name__)

# Between two looks at the file.
LOOK_S = 1.0
# For the last trace of a run that ends.
LAST_WRITE_S = 60.0


class Tracer:
    """Traces this rank when it is asked to; without the agent's folder never."""

    def __init__(self, store: Store, *, rank: int, local_rank: int, poll_s: float = POLL_S) -> None:
        drain_file = os.environ.get(DRAIN_FILE_VARIABLE)
        self._file = Path(drain_file).with_name("trace-request.json") if drain_file else None
        self._store, self._rank, self._fetches, self._poll_s = store, rank, local_rank == 0, poll_s
        self._looked_at, self._handled = 0.0, ""
        self._request: TraceRequest | None = None
        self._profile: Any = None  # torch has no types for it
        self._mark: Any = None
        self._ends_at = 0
        self._writer: threading.Thread | None = None
        self._closing = threading.Event()

    def start(self) -> None:
        """Look for requests from now on."""
        if self._file is not None and self._fetches:
            self._file.unlink(missing_ok=True)
            threading.Thread(target=self._fetch, name="trace-requests", daemon=True).start()

    def before_step(self, step: int) -> None:
        """Begin or end a trace; ``step`` is about to begin."""
        if self._file is None:
            return
        if self._profile is not None:
            self._mark.__exit__(None, None, None)
            if step >= self._ends_at:
                self._finish()
            else:
                self._mark_step(step)
        elif time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            if (request := self._wanted(self._file)) is not None:
                self._begin(request, step)

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

    def _begin(self, request: TraceRequest, step: int) -> None:
        self._handled, self._request, self._ends_at = request.id, request, step + request.steps
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            started = profile(activities=activities, record_shapes=True, acc_events=True)
            started.start()
        except Exception as error:  # noqa: BLE001 - the training's own profiler may run
            self._write_failure(request, f"torch.profiler does not start: {type(error).__name__}: {error}")
            return
        self._profile = started
        self._mark_step(step)
        logger.info("tracing %d steps from step %d, asked for by %s", request.steps, step, request.by)

    def _mark_step(self, step: int) -> None:
        self._mark = record_function(f"step {step}")
        self._mark.__enter__()

    def _finish(self) -> None:
        request, taken, self._profile = self._request, self._profile, None
        assert request is not None
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # kernels of the last step
            taken.stop()
        except Exception as error:  # noqa: BLE001
            self._write_failure(request, f"torch.profiler does not stop: {type(error).__name__}: {error}")
            return
        self._in_background(self._write, request, taken)

    def _write(self, request: TraceRequest, taken: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            try:
                taken.export_chrome_trace(str(path))
                content = path.read_bytes()
            except Exception as error:  # noqa: BLE001 - a full disk
                self._put(request.failure, f"the trace cannot be written: {error}\n".encode())
                return
        self._put(request.trace, content)
        logger.info("the trace is %s/%s, %.1f MB", self._store.uri, request.trace, len(content) / 1e6)

    def _write_failure(self, request: TraceRequest, reason: str) -> None:
        logger.warning("no trace: %s", reason)
        self._in_background(self._put, request.failure, f"{reason}\n".encode())

    def _in_background(self, work: Any, *arguments: Any) -> None:
        self._writer = threading.Thread(target=work, args=arguments, name="trace-writer", daemon=True)
        self._writer.start()

    def _put(self, name: str, content: bytes) -> None:
        try:
            with suppress(AlreadyExistsError):  # workers of several nodes have the same ranks
                self._store.write(name, [content])
        except Exception:
            logger.exception("%s/%s cannot be written", self._store.uri, name)

    def _wanted(self, file: Path) -> TraceRequest | None:
        """Request for this rank that it has not carried out, if any."""
        try:
            request = read_trace_request(file.read_text(encoding="utf-8"), str(file))
        except (OSError, FormatError):
            return None
        return request if request.rank == self._rank and request.id != self._handled else None

    def _fetch(self) -> None:
        seen, problem = "", ""
        while not self._closing.is_set():
            try:
                seen = self._fetch_once(seen)
                problem = ""
            except Exception as error:  # noqa: BLE001 - no permission, no network: training goes on without traces
                if (text := f"{type(error).__name__}: {error}") != problem:
                    logger.warning("requests for traces cannot be read: %s", text)
                    problem = text
            self._closing.wait(self._poll_s)

    def _fetch_once(self, seen: str) -> str:
        """Put a new request into the file; returns the id of the newest."""
        assert self._file is not None
        try:
            text = self._store.read(REQUEST).decode()
        except FileNotFoundError:
            return seen
        request = read_trace_request(text, f"{self._store.uri}/{REQUEST}")
        if request.id == seen:
            return seen
        answered = self._store.names(f"{FOLDER}/{request.id}/")
        if not answered and datetime.now(UTC) - request.at < MAX_AGE:
            new = self._file.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(self._file)
        return request.id
