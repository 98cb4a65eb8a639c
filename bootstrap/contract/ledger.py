"""Events of a training's ledger and their summary: seconds and dollars by category.

bootstrap/training/ledger says which event closes which time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

# Beside the checkpoints: one file, or on S3 objects with a minute of events each.
LEDGER_FILE = "ledger.jsonl"
SEGMENT_PREFIX = "ledger/"
# Part of a step by which a rank is slower than the median rank, from which on it is named.
SLOW_SHARE = 0.10

Category = Literal["useful", "lost", "checkpoint", "restart", "idle"]
CATEGORIES: tuple[Category, ...] = ("useful", "lost", "checkpoint", "restart", "idle")


class LedgerError(ValueError):
    """A ledger that cannot be summarized."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Account of a run's time; the sum of ``seconds`` is ``wall_seconds``.

    ``usd``: None where a price is missing; idle is an upper bound, as a machine that was gone cost nothing.
    ``lost_steps`` include repeats; ``unsaved_seconds``: useful, in no committed checkpoint yet.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """Slowest rank of a minute, and by which part of a step it is slower than the median rank."""

    rank: int
    host: str
    slower: float
    part: str

    def __str__(self) -> str:
        why = "in its forward pass" if self.part == "compute" else "of a step, before its forward pass (input, host)"
        return f"rank {self.rank} on {self.host} is {self.slower:.0%} slower than the median rank {why}"


@dataclass
class _Stretch:
    """Training between two marks."""

    first_step: int
    last_step: int
    seconds: float
    price: float | None

    def split_at(self, step: int) -> tuple[float, float]:
        """Seconds before and after ``step`` steps were done; all steps count as equally long."""
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
    """Account for every second of ``events`` in any order; LedgerError without a start event."""
    ordered = in_order(events)
    if not ordered:
        raise LedgerError("the ledger holds no start event: no process ever ran with it")
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
            account.add("restart" if boot is None or event.get("boot") == boot else "idle", elapsed, price)
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


def read_loss(event: dict[str, Any]) -> tuple[int, float | None] | None:
    """Return the step and the loss that an event brings, if any; None for a loss that was not finite."""
    if "loss_step" not in event:
        return None
    value = event["loss"]
    return int(event["loss_step"]), None if value is None else float(value)


def read_straggler(event: dict[str, Any]) -> Straggler | None:
    """Return the slowest rank that an event brings, if any."""
    if "slowest" not in event:
        return None
    found = event["slowest"]
    return Straggler(
        rank=int(found["rank"]), host=str(found["host"]), slower=float(found["slower"]), part=str(found["part"])
    )


def in_order(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group by writer, sorted by the second event: two runs inside one process share its start time."""
    by_writer: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: float(event["t"])):
        by_writer.setdefault(str(event["writer"]), []).append(event)
    started = [own for own in by_writer.values() if own[0]["event"] == "start"]
    started.sort(key=lambda own: float(own[min(1, len(own) - 1)]["t"]))
    return [event for own in started for event in own]


def read_lines(lines: Iterable[str]) -> tuple[list[dict[str, Any]], int]:
    """Events of JSON lines, and the number of unreadable lines."""
    events, skipped = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            str(event["event"]), str(event["writer"])
            if not math.isfinite(float(event["t"])):
                raise ValueError(event["t"])
            if event["event"] in ("train", "progress", "stall", "commit") or event.get("step") is not None:
                int(event["step"])
            read_loss(event), read_straggler(event)
            events.append(event)
        except (ValueError, KeyError, TypeError, OverflowError):
            skipped += 1
    return events, skipped
