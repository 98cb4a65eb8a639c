"""Where the run's time and money went: an append-only record that survives restarts, and its summary.

Each event closes the time since the event before it, so the categories add up to the wall time by construction:

    event       the time it closes is
    start       a gap with no process: restart on the same boot of a machine, idle on another
    train       restart: imports, rendezvous, loading a checkpoint
    progress    training of the steps since the last mark: useful, until a later train event rolls them back: lost
    stall       checkpoint: training stood still for it
    stop, done  checkpoint: the final save
    failed      lost: a step that did not complete
    commit      nothing; it tells which step is safe

A killed process leaves no last event; what it did after its last mark (a second or one step) counts as restart.

Run ``python -m bootstrap.training.ledger PATH|s3://BUCKET/PREFIX [--format json]`` for the summary.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bootstrap.training.environment import seconds_from_environment, usd_per_hour_from_environment
from bootstrap.training.errors import TrainingError
from bootstrap.training.stores import LocalStore, Store, open_store

logger = logging.getLogger(__name__)

Category = Literal["useful", "lost", "checkpoint", "restart", "idle"]
CATEGORIES: tuple[Category, ...] = ("useful", "lost", "checkpoint", "restart", "idle")
# What a kill can make uncertain; a line is about 90 bytes, so a day of them is 8 MB.
PROGRESS_INTERVAL_S = 1.0
PROGRESS_VARIABLE = "GPUFLEET_LEDGER_INTERVAL_S"
# S3 cannot append: the events of this long make one object.
SEGMENT_INTERVAL_S = 60.0
PRICE_VARIABLE = "GPUFLEET_PRICE_USD_PER_HOUR"
LEDGER_FILE = "ledger.jsonl"
SEGMENT_PREFIX = "ledger/"


class Sink(Protocol):
    """Where lines go. ``flush`` makes them durable."""

    def append(self, line: str) -> None:
        """Take one line without its newline."""

    def flush(self) -> None:
        """Make every line taken so far durable."""


class FileSink:
    """Lines appended to a file: in the page cache at once (a killed process loses none), on the disk at ``flush``."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        # The last writer may have died in the middle of a line; ours must not be glued to it.
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._write(b"\n")

    def append(self, line: str) -> None:
        """See ``Sink.append``; one write call, so that lines of two writers do not mix."""
        self._write(line.encode() + b"\n")

    def flush(self) -> None:
        """See ``Sink.flush``."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())

    def _write(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(data)


class SegmentSink:
    """Lines collected into immutable objects of a store: one a minute, and one at each ``flush``."""

    def __init__(self, store: Store, writer_id: str) -> None:
        self._store = store
        self._writer_id = writer_id
        self._lines: list[str] = []
        self._number = 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def append(self, line: str) -> None:
        """See ``Sink.append``."""
        with self._lock:
            self._lines.append(line)
        if time.monotonic() - self._last > SEGMENT_INTERVAL_S:
            # Off the training thread: an upload takes tens of milliseconds.
            self._last = time.monotonic()
            threading.Thread(target=self._flush_quietly, name="ledger-segment", daemon=True).start()

    def flush(self) -> None:
        """See ``Sink.flush``."""
        with self._lock:
            lines, self._lines = self._lines, []
            self._number += 1
            name = f"{SEGMENT_PREFIX}{self._writer_id}-{self._number:06d}.jsonl"
        if lines:
            text = "\n".join(lines) + "\n"
            try:
                self._store.write(name, lambda file: _write_all(file, text))
            except TrainingError:
                with self._lock:
                    self._lines = lines + self._lines
                raise
        self._last = time.monotonic()

    def _flush_quietly(self) -> None:
        try:
            self.flush()
        except TrainingError as error:
            logger.error("ledger: %s; kept for the next segment", error)


def _write_all(file: Any, text: str) -> None:
    file.write(text.encode())


class Ledger:
    """Writer of one process (rank 0). A ledger that cannot be written is logged and never stops training."""

    def __init__(self, sink: Sink, *, writer_id: str, price_usd_per_hour: float | None = None) -> None:
        self._sink = sink
        self._writer_id = writer_id
        self._price = price_usd_per_hour
        # Wall time that cannot step back while this process lives.
        self._wall_at_zero = time.time() - time.monotonic()
        self._last_progress = 0.0
        self._progress_interval_s = seconds_from_environment(PROGRESS_VARIABLE) or PROGRESS_INTERVAL_S

    @classmethod
    def open(cls, store: Store, *, writer_id: str) -> Ledger:
        """Ledger next to the checkpoints, with the fleet's price of ``GPUFLEET_PRICE_USD_PER_HOUR``."""
        sink: Sink = (
            FileSink(store.root / LEDGER_FILE) if isinstance(store, LocalStore) else SegmentSink(store, writer_id)
        )
        return cls(sink, writer_id=writer_id, price_usd_per_hour=usd_per_hour_from_environment(PRICE_VARIABLE))

    def start(self, *, started_at: float, world_size: int) -> None:
        """This process exists since ``started_at`` (Unix seconds)."""
        fields: dict[str, Any] = {"world_size": world_size, "boot": boot_id()}
        if self._price is not None:
            fields["price_usd_per_hour"] = self._price
        self._append("start", at=started_at, **fields)

    def train(self, step: int) -> None:
        """Training (re)starts with ``step`` steps done; whatever was done after them is lost."""
        self._last_progress = time.monotonic()
        self._append("train", step=step)
        self.flush()

    def progress(self, step: int, *, force: bool = False) -> None:
        """``step`` steps are done; written at most once a second (``GPUFLEET_LEDGER_INTERVAL_S``) unless forced."""
        now = time.monotonic()
        if force or now - self._last_progress >= self._progress_interval_s:
            self._last_progress = now
            self._append("progress", step=step)

    def stall(self, step: int) -> None:
        """Training stood still for a checkpoint since the last event."""
        self._append("stall", step=step)

    def commit(self, step: int, **facts: Any) -> None:
        """A checkpoint of ``step`` is complete and valid."""
        self._append("commit", step=step, **facts)

    def end(self, event: Literal["stop", "done", "failed"], step: int, reason: str) -> None:
        """The process is about to leave."""
        self._append(event, step=step, reason=reason)
        self.flush()

    def flush(self) -> None:
        """Make the events so far durable."""
        try:
            self._sink.flush()
        except (OSError, TrainingError) as error:
            logger.error("ledger: cannot flush: %s", error)

    def _append(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        now = self._wall_at_zero + time.monotonic() if at is None else at
        line = json.dumps({"event": event, "t": round(now, 4), "writer": self._writer_id, **fields})
        try:
            self._sink.append(line)
        except OSError as error:
            logger.error("ledger: cannot append: %s", error)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Where the time went.

    Attributes:
        seconds: by category; their sum is ``wall_seconds``.
        usd: by category at the fleet's price while it ran, None where a price is missing. Idle is an upper bound: a
            machine that was gone cost nothing.
        wall_seconds: from the first process's start to the last event.
        starts: processes that started.
        steps: completed and not rolled back.
        lost_steps: completed and rolled back, repeats included.
        unsaved_seconds: part of useful that no committed checkpoint holds yet.
        skipped_lines: of the ledger, unreadable.
    """

    seconds: dict[Category, float]
    usd: dict[Category, float] | None
    wall_seconds: float
    starts: int
    steps: int
    lost_steps: int
    unsaved_seconds: float
    finished: bool
    skipped_lines: int


@dataclass
class _Stretch:
    """Training between two marks."""

    first_step: int
    last_step: int
    seconds: float
    price: float | None

    def split_at(self, step: int) -> tuple[float, float]:
        """Seconds before and after ``step`` steps were done, taking the steps as equally long."""
        if step <= self.first_step:
            return 0.0, self.seconds
        if step >= self.last_step:
            return self.seconds, 0.0
        before = self.seconds * (step - self.first_step) / (self.last_step - self.first_step)
        return before, self.seconds - before


@dataclass
class _Account:
    """Running totals while the events are read in order."""

    seconds: dict[Category, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    usd: dict[Category, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    unpriced_seconds: float = 0.0
    kept: list[_Stretch] = field(default_factory=list)
    lost_steps: int = 0

    def add(self, category: Category, seconds: float, price: float | None) -> None:
        self.seconds[category] += seconds
        if price is None:
            self.unpriced_seconds += seconds
        else:
            self.usd[category] += seconds * price / 3600

    def roll_back_to(self, step: int) -> None:
        while self.kept and self.kept[-1].last_step > step:
            stretch = self.kept.pop()
            before, after = stretch.split_at(step)
            self.add("lost", after, stretch.price)
            self.lost_steps += stretch.last_step - max(step, stretch.first_step)
            if step > stretch.first_step:
                self.kept.append(_Stretch(stretch.first_step, step, before, stretch.price))


def summarize(events: Iterable[dict[str, Any]], *, skipped_lines: int = 0) -> Summary:
    """Account for every second between the first event and the last.

    Args:
        events: of the ledger, in any order.
        skipped_lines: passed through.

    Raises:
        TrainingError: no start event.
    """
    ordered = _in_order(events)
    if not ordered:
        raise TrainingError("the ledger holds no start event: no process ever ran with it")
    account = _Account()
    first_t = last_t = float(ordered[0]["t"])
    step = committed = starts = 0
    boot: str | None = None
    price: float | None = None
    finished = is_training = False
    for event in ordered:
        kind, t = event["event"], max(float(event["t"]), last_t)
        elapsed = t - last_t
        if kind == "commit":
            committed = int(event["step"])
            continue
        if kind == "start":
            same_machine = boot is None or event.get("boot") == boot
            account.add("restart" if same_machine else "idle", elapsed, price)
            boot, price, starts = event.get("boot"), event.get("price_usd_per_hour"), starts + 1
            finished = is_training = False
        elif kind == "train":
            account.add("restart", elapsed, price)
            step, is_training = int(event["step"]), True
            account.roll_back_to(step)
        elif not is_training:
            account.add("restart", elapsed, price)
        elif kind == "progress":
            if int(event["step"]) > step:
                account.kept.append(_Stretch(step, int(event["step"]), elapsed, price))
                step = int(event["step"])
            else:
                account.add("checkpoint", elapsed, price)
        else:
            account.add("lost" if kind == "failed" else "checkpoint", elapsed, price)
            finished = kind == "done"
        last_t = t
    unsaved = 0.0
    for stretch in account.kept:
        account.add("useful", stretch.seconds, stretch.price)
        unsaved += stretch.split_at(committed)[1]
    return Summary(
        seconds=account.seconds,
        usd=None if account.unpriced_seconds > 0 else account.usd,
        wall_seconds=last_t - first_t,
        starts=starts,
        steps=account.kept[-1].last_step if account.kept else 0,
        lost_steps=account.lost_steps,
        unsaved_seconds=unsaved,
        finished=finished,
        skipped_lines=skipped_lines,
    )


def _in_order(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events by writer, in the order in which the writers came to something.

    One process's events never interleave with the next one's. The start event tells when the process was made, which
    two runs inside one process share.
    """
    by_writer: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_writer.setdefault(str(event["writer"]), []).append(event)
    writers = [sorted(own, key=lambda event: float(event["t"])) for own in by_writer.values()]
    started = [own for own in writers if own[0]["event"] == "start"]
    started.sort(key=lambda own: float(own[min(1, len(own) - 1)]["t"]))
    return [event for own in started for event in own]


def read_lines(lines: Iterable[str]) -> tuple[list[dict[str, Any]], int]:
    """Events of JSON lines, and how many lines were no event (a writer that died in the middle of one leaves one)."""
    events, skipped = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            float(event["t"]), str(event["event"]), str(event["writer"])
            if event["event"] in ("train", "progress", "stall", "commit"):
                int(event["step"])
        except (ValueError, KeyError, TypeError):
            skipped += 1
            continue
        events.append(event)
    return events, skipped


def read_ledger(where: str) -> Summary:
    """Summary of the ledger in a file, a checkpoint directory or an S3 checkpoint prefix.

    Raises:
        TrainingError: nothing there.
    """
    if where.startswith("s3://"):
        store = open_store(where)
        names = store.names(SEGMENT_PREFIX)
        lines = [line for name in names for line in store.read(name).decode(errors="replace").splitlines()]
    else:
        path = Path(where) / LEDGER_FILE if Path(where).is_dir() else Path(where)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise TrainingError(f"cannot read the ledger: {error}") from error
    events, skipped = read_lines(lines)
    return summarize(events, skipped_lines=skipped)


def boot_id() -> str:
    """Identity of this boot of this machine (``/proc/sys/kernel/random/boot_id``), or its host name elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def process_started_at() -> float:
    """Unix seconds at which this process was started, before its imports (field 22 of ``/proc/self/stat``, proc(5))."""
    try:
        ticks = float(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


def table(summary: Summary) -> str:
    """The summary as text for a terminal."""
    lines = [f"{'':<12}{'seconds':>12}{'share':>9}" + (f"{'USD':>12}" if summary.usd else "")]
    wall = summary.wall_seconds or 1.0
    for category in CATEGORIES:
        seconds = summary.seconds[category]
        usd = f"{summary.usd[category]:>12.4f}" if summary.usd else ""
        lines.append(f"{category:<12}{seconds:>12.2f}{seconds / wall:>9.1%}{usd}")
    total = f"{sum(summary.usd.values()):>12.4f}" if summary.usd else ""
    lines.append(f"{'wall':<12}{summary.wall_seconds:>12.2f}{1:>9.1%}{total}")
    state = "finished" if summary.finished else f"not finished, {summary.unsaved_seconds:.1f} s of it not yet saved"
    lines.append(f"{summary.steps} steps kept, {summary.lost_steps} recomputed, {summary.starts} starts, {state}")
    if summary.skipped_lines:
        lines.append(f"{summary.skipped_lines} unreadable lines skipped (a process was killed while writing)")
    if not summary.usd:
        lines.append(f"no dollars: set {PRICE_VARIABLE} on the node to the fleet's price")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m bootstrap.training.ledger``."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.training.ledger", description="Where a training run's seconds and dollars went."
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
