"""Ledger: the run's append-only record of every second and dollar.

Each event closes the time since the event before it, so the categories add up to the wall time:

    event       category of the time that it closes
    start       a gap with no process: restart on the same boot of a machine, idle on another
    train       restart: imports, rendezvous, loading a checkpoint
    progress    training of the steps since the last mark: useful, or lost once a later train event rolls them back
    stall       checkpoint: training stood still for one
    stop, done  checkpoint: the final save
    failed      lost: a step that did not complete
    commit      none; the event tells which step is saved

A progress event brings the newest reported loss, once, with its step, and once a minute the slowest rank.

A killed process writes no last event; its work after its last mark (a second or one step) counts as restart.

``python -m bootstrap.training.ledger PATH|s3://BUCKET/PREFIX [--format json]`` prints a ledger's summary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from bootstrap.contract.ledger import (
    LEDGER_FILE,
    SEGMENT_PREFIX,
    LedgerError,
    Straggler,
    Summary,
    read_lines,
    summarize,
)
from bootstrap.contract.words import counted
from bootstrap.training.environment import positive_number
from bootstrap.training.errors import CheckpointError, TrainingError
from bootstrap.training.stores import LocalStore, Store, open_store

PRICE_VARIABLE = "GPUFLEET_PRICE_USD_PER_HOUR"
logger = logging.getLogger(__name__)

# A kill makes this time uncertain. A day of 130-byte lines, each with a loss, is 11 MB.
PROGRESS_INTERVAL_S = 1.0
PROGRESS_VARIABLE = "GPUFLEET_LEDGER_INTERVAL_S"
# Longest time that training waits for a line; it takes 0.1 ms where the disk is not busy.
APPEND_LIMIT_S = 0.02
# S3 cannot append: one object a minute.
SEGMENT_INTERVAL_S = 60.0
# Start of a process that stood by (standby.py): Unix seconds at which it got its command.
STARTED_VARIABLE = "GPUFLEET_STARTED_AT"


class Sink:
    """Lines on their way to ``write``, by a thread: a disk that a checkpoint is written to may be slow.

    ``write`` gets a text, whose first line feed ends the torn line of a killed writer, and whether all must be durable.
    ``every_s``: time for which lines are gathered.
    """

    def __init__(self, write: Callable[[str, bool], None], every_s: float = 0.0) -> None:
        self._write, self._every_s = write, every_s
        self._lines: list[str] = []
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._has_lines, self._has_written = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="ledger", daemon=True).start()

    def append(self, line: str) -> None:
        """Take one line without its newline."""
        self._has_written.clear()
        with self._lock:
            self._lines.append(line)
        self._has_lines.set()
        if not self._every_s:
            self._has_written.wait(APPEND_LIMIT_S)

    def flush(self, *, is_durable: bool = True) -> None:
        """Write every line so far; where that fails, they stay for the next time."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, []
            try:
                if lines or is_durable:
                    self._write("".join(f"\n{line}" for line in lines), is_durable)
            except Exception:
                with self._lock:
                    self._lines = lines + self._lines
                raise

    def _run(self) -> None:
        while True:
            self._has_lines.wait()
            self._has_lines.clear()
            time.sleep(self._every_s)
            try:
                self.flush(is_durable=False)
            except Exception as error:  # noqa: BLE001 - this thread writes the run's later lines too
                logger.error("ledger: %s; kept for the next line", error)
            self._has_written.set()


def file_sink(path: Path) -> Sink:
    """Lines appended to a file, each text in one write: two writers' lines do not mix."""

    def write(text: str, is_durable: bool) -> None:
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())
            if is_durable:
                os.fsync(file.fileno())

    path.parent.mkdir(parents=True, exist_ok=True)
    return Sink(write)


def segment_sink(store: Store, writer_id: str) -> Sink:
    """Lines in immutable objects of a store: one a minute, and one at each ``flush``."""
    numbers = itertools.count(1)

    def write(text: str, is_durable: bool) -> None:
        if text:
            store.write(f"{SEGMENT_PREFIX}{writer_id}-{next(numbers):06d}.jsonl", [text.encode()])

    return Sink(write, SEGMENT_INTERVAL_S)


class Ledger:
    """Ledger of one process; ``sink`` None (all ranks but rank 0) discards events. Later errors are only logged."""

    def __init__(self, sink: Sink | None, *, writer_id: str) -> None:
        self._sink = sink
        self._writer_id = writer_id
        self._price_usd_per_hour = positive_number(PRICE_VARIABLE, "USD per hour of the whole fleet,")
        # Wall time that cannot step back while this process lives.
        self._wall_at_zero = time.time() - time.monotonic()
        self._progress_at = 0.0
        self._news: dict[str, Any] = {}
        self._progress_interval_s = positive_number(PROGRESS_VARIABLE) or PROGRESS_INTERVAL_S

    @classmethod
    def open(cls, store: Store, rank: int = 0, *, writer_id: str) -> Ledger:
        """Ledger next to the checkpoints, with the price of ``GPUFLEET_PRICE_USD_PER_HOUR``; rank 0 writes it."""
        if rank:
            return cls(None, writer_id=writer_id)
        if isinstance(store, LocalStore):
            return cls(file_sink(store.root / LEDGER_FILE), writer_id=writer_id)
        return cls(segment_sink(store, writer_id), writer_id=writer_id)

    def start(self, *, started_at: float, world_size: int) -> None:
        """Record the start of this process, in Unix seconds."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()  # of this machine
        price = {} if self._price_usd_per_hour is None else {"price_usd_per_hour": self._price_usd_per_hour}
        self._append("start", at=started_at, world_size=world_size, boot=boot, **price)

    def train(self, step: int) -> None:
        """Record that training goes on after ``step`` steps; later ones are lost.

        CheckpointError: the store takes no writes (rights, a key), so a month of steps would leave no checkpoint.
        """
        self._progress_at = time.monotonic()
        self._append("train", step=step)
        try:
            if self._sink is not None:
                self._sink.flush()
        except (OSError, TrainingError) as error:
            raise CheckpointError(f"training does not begin, since no checkpoint could be saved: {error}") from error

    def progress(self, step: int, *, force: bool = False) -> None:
        """Record ``step`` completed steps, at most once an interval unless forced."""
        now = time.monotonic()
        if force or now - self._progress_at >= self._progress_interval_s:
            self._progress_at = now
            self._append("progress", step=step, **self._news)
            self._news = {}

    def report_loss(self, step: int, loss: float) -> None:
        """Keep the loss of step ``step`` for the next progress event; JSON has no NaN, so that is null there."""
        self._news |= {"loss_step": step, "loss": float(f"{loss:.6g}") if math.isfinite(loss) else None}

    def report_straggler(self, straggler: Straggler) -> None:
        """Keep the slowest rank of the last minute for the next progress event."""
        self._news["slowest"] = asdict(straggler)

    def save(self, event: Literal["stall", "commit"], step: int, **facts: Any) -> None:
        """Record that a checkpoint stopped training since the last event, or that one of ``step`` is valid."""
        self._append(event, step=step, **facts)

    def end(self, event: Literal["stop", "done", "failed"], step: int, reason: str) -> None:
        """Record that the process is about to exit."""
        self._append(event, step=step, reason=reason)
        self.flush()

    def flush(self) -> None:
        """Make the events so far durable."""
        try:
            if self._sink is not None:
                self._sink.flush()
        except (OSError, TrainingError) as error:
            logger.error("ledger: cannot flush: %s", error)

    def _append(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        if self._sink is None:
            return
        now = self._wall_at_zero + time.monotonic() if at is None else at
        self._sink.append(json.dumps({"event": event, "t": round(now, 4), "writer": self._writer_id, **fields}))


def process_started_at() -> float:
    """Unix seconds of this process's start, before its imports (field 22 of ``/proc/self/stat``, proc(5))."""
    if started := positive_number(STARTED_VARIABLE):
        return started
    ticks = float(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return time.time() - max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def read_ledger(address: str) -> Summary:
    """Summary of the ledger in a file, checkpoint directory or S3 prefix; TrainingError without one."""
    if address.startswith("s3://"):
        store = open_store(address)
        names = store.names(SEGMENT_PREFIX)
        lines = [line for name in names for line in store.read(name).decode(errors="replace").splitlines()]
    else:
        path = Path(address) / LEDGER_FILE if Path(address).is_dir() else Path(address)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise TrainingError(f"cannot read the ledger: {error}") from error
    events, skipped = read_lines(lines)
    try:
        return summarize(events, skipped_lines=skipped)
    except LedgerError as error:
        raise TrainingError(str(error)) from error


def table(summary: Summary) -> str:
    """Summary as text for a terminal."""
    usd = dict[str, float]((summary.usd or {}).items())
    if usd:
        usd["wall"] = sum(usd.values())
    lines = [f"{'':<12}{'seconds':>12}{'share':>9}" + (f"{'USD':>12}" if usd else "")]
    for name, seconds in (*summary.seconds.items(), ("wall", summary.wall_seconds)):
        dollars = f"{usd[name]:>12.4f}" if usd else ""
        lines.append(f"{name:<12}{seconds:>12.2f}{seconds / (summary.wall_seconds or 1.0):>9.1%}{dollars}")
    state = "finished" if summary.finished else f"not finished, {summary.unsaved_seconds:.1f} s of it not yet saved"
    lines.append(
        f"{counted(summary.steps, 'step')} kept, {summary.lost_steps:,} recomputed, "
        f"{counted(summary.starts, 'start')}, {state}"
    )
    if summary.skipped_lines:
        lines.append(
            f"{counted(summary.skipped_lines, 'unreadable line')} skipped (a process was killed while writing)"
        )
    if not usd:
        lines.append(f"no dollars: set {PRICE_VARIABLE} on the node to the fleet's price")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the summary; 1 where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.training.ledger", description="Summary of a training run's seconds and dollars."
    )
    parser.add_argument("path", help="ledger file, checkpoint directory or s3://BUCKET/PREFIX of the checkpoints")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    try:
        summary = read_ledger(options.path)
    except TrainingError as error:
        sys.stderr.write(f"ledger: {error}\n")
        return 1
    text = json.dumps(asdict(summary), indent=2) if options.format == "json" else table(summary)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
