"""Tokens per second of the whole job, from the progress file on the node of rank 0."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Trained tokens at the Unix time ``at``."""

    at: float
    tokens: float


class Throughput:
    """Rate of whole steps between two reads (format: bootstrap/training/progress.py)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Mark | None = None

    def tokens_per_second(self) -> float | None:
        """Rate since the last new step; None without one, or with unknown tokens."""
        if (mark := read(self._path)) is None:
            return None
        last, self._last = self._last, mark
        # Fewer tokens than before: training went back to a checkpoint, and lost steps are no speed.
        if last is None or mark.at <= last.at or mark.tokens < last.tokens:
            return None
        return (mark.tokens - last.tokens) / (mark.at - last.at)


def read(path: Path) -> Mark | None:
    """Read the progress file; None where it is missing or unreadable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Mark(at=float(document["at"]), tokens=float(document["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
