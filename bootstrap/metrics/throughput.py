"""Tokens per second of the whole job, from the progress file that training writes on its first node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """``tokens`` tokens were trained on at ``at`` (Unix seconds)."""

    at: float
    tokens: float


class Throughput:
    """Rate between two looks at the file. Steps are not cut in pieces: a rate is that of whole steps.

    Args:
        path: the progress file (bootstrap/training/progress.py has its format).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Mark | None = None

    def tokens_per_second(self) -> float | None:
        """Since the last look at which a step had been done; None where no step was, or nobody knows the tokens."""
        mark = read(self._path)
        if mark is None:
            return None
        last, self._last = self._last, mark
        # Fewer tokens than before: training went back to a checkpoint, and what was lost is no speed.
        if last is None or mark.at <= last.at or mark.tokens < last.tokens:
            return None
        return (mark.tokens - last.tokens) / (mark.at - last.at)


def read(path: Path) -> Mark | None:
    """What the file says, or None where there is none or it is not one."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Mark(at=float(told["at"]), tokens=float(told["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
