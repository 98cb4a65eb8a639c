"""``Run``: what a training did, from its ledger and the controller's account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from bootstrap.contract.ledger import CATEGORIES, Summary, in_order, read_lines, read_loss, summarize

# Marks of one line of a chart.
MOST_POINTS = 400

# Categories of the ledger, in a reader's words.
CATEGORY_WORDS = {
    "useful": "training that was kept",
    "lost": "training that was repeated",
    "checkpoint": "saving checkpoints",
    "restart": "starts and restarts",
    "idle": "no machine",
}


@dataclass(frozen=True, kw_only=True)
class Break:
    """Time from the last event of a process to the first step of the next."""

    hours: float  # when it began, since the first start
    cause: str  # reason that the process gave, if it could
    step: int  # steps done at its last event
    repeated: int  # steps that the next process did again
    gap_hours: float | None  # until training went on; None where it has not


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training so far."""

    words: tuple[str, ...] = ()  # lines on its state, the first the most important
    measures: tuple[Mapping[str, Any], ...] = ()  # predicted against actual, as in gpufleet status
    summary: Summary | None = None  # seconds and dollars of the ledger
    breaks: tuple[Break, ...] = ()  # interruptions and failures, in order
    losses: tuple[Mapping[str, float], ...] = ()  # by step; empty where the training gave none

    @property
    def finished(self) -> bool:
        """Tell if the training did its last step."""
        return self.summary is not None and self.summary.finished

    @property
    def steps(self) -> int:
        """Steps done."""
        return self.summary.steps if self.summary else 0

    @property
    def hours(self) -> float | None:
        """Hours since the run began, by the controller or by the ledger; until its end where it has ended."""
        return self._find_actual("hours", self.summary.wall_seconds / 3600 if self.summary else None)

    @property
    def usd(self) -> float | None:
        """USD so far, by the controller's meter or by the ledger."""
        usd = self.summary.usd if self.summary else None
        return self._find_actual("cost so far", sum(usd.values()) if usd else None)

    def _find_actual(self, measure: str, by_ledger: float | None) -> float | None:
        known = (row["actual"] for row in self.measures if row["measure"] == measure and row["actual"] is not None)
        return next(known, by_ledger)

    @property
    def ledger_rows(self) -> list[tuple[str, float, float, float | None]]:
        """Category, hours, percent and USD of each category that has time."""
        if self.summary is None:
            return []
        usd = self.summary.usd or {}
        total = self.summary.wall_seconds or 1.0
        return [
            (CATEGORY_WORDS[name], seconds / 3600, 100 * seconds / total, usd.get(name))
            for name in CATEGORIES
            if (seconds := self.summary.seconds[name])
        ]


def read_run(
    ledger: Iterable[str],
    *,
    words: Sequence[str] = (),
    measures: Sequence[Mapping[str, Any]] = (),
) -> Run:
    """Build a run from the lines of its ledger.

    Raises:
        LedgerError: the ledger is not empty, and no process ever ran with it.
    """
    events, skipped = read_lines(ledger)
    if not events and not skipped:
        return Run(words=tuple(words), measures=tuple(measures))
    summary = summarize(events, skipped_lines=skipped)
    return Run(
        words=tuple(words),
        measures=tuple(measures),
        summary=summary,
        breaks=_breaks(in_order(events)),
        losses=_thinned(dict(filter(None, map(read_loss, in_order(events))))),
    )


def _breaks(events: Sequence[Mapping[str, Any]]) -> tuple[Break, ...]:
    begin = float(events[0]["t"])
    processes: list[list[Mapping[str, Any]]] = []
    for event in events:
        if event["event"] == "start":
            processes.append([])
        if event["event"] != "commit":
            processes[-1].append(event)
    breaks = []
    for before, after in pairwise(processes):
        last = before[-1]
        step = max((int(event["step"]) for event in before if event.get("step") is not None), default=0)
        train = next((event for event in after if event["event"] == "train"), None)
        breaks.append(
            Break(
                hours=(float(last["t"]) - begin) / 3600,
                cause=str(last.get("reason") or "killed: its last event has no reason"),
                step=step,
                repeated=max(0, step - int(train["step"])) if train else 0,
                gap_hours=(float(train["t"]) - float(last["t"])) / 3600 if train else None,
            )
        )
    return tuple(breaks)


def _thinned(by_step: Mapping[int, float | None]) -> tuple[dict[str, float], ...]:
    """Finite losses by step, for a chart; a repeated step has its last."""
    rows = [
        {"step": step, "loss": loss} for step, loss in sorted(by_step.items()) if loss is not None and isfinite(loss)
    ]
    return tuple(rows[:: max(1, len(rows) // MOST_POINTS)])
