"""Report of the smoke test, without torch."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured value and its verdict; ``value`` is None where the test does not apply."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    must_be: Literal["at_most", "at_least"]
    duration_s: float = 0.0
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True where the value keeps its limit; NaN keeps none."""
        if self.value is None or self.limit is None:
            return self.value is None or math.isfinite(self.value)
        return self.value <= self.limit if self.must_be == "at_most" else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Fields of the report, in its order."""
        return {"name": self.name, "passed": self.passed, **asdict(self), "duration_s": round(self.duration_s, 3)}

    def line(self) -> str:
        """One line for a terminal or a log."""
        shown = "-" if self.value is None else f"{self.value:.4g}"
        limit = "" if self.limit is None else f" ({self.must_be.replace('_', ' ')} {self.limit:.4g})"
        note = f": {self.note}" if self.note else ""
        return f"{'pass' if self.passed else 'FAIL'} {self.name} {shown} {self.unit}{limit}{note}"


def build(
    *,
    started_at: str,
    arguments: dict[str, Any],
    error: str | None,
    duration_s: float = 0.0,
    facts: dict[str, Any] | None = None,
    results: Sequence[Result] = (),
) -> dict[str, Any]:
    """Report as a dictionary; passes with results, all passed, and no error."""
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": error is None and bool(results) and all(result.passed for result in results),
        "error": error,
        "started_at": started_at,
        "duration_s": round(duration_s, 3),
        "arguments": arguments,
        **(facts or {}),
        "tests": [result.as_dict() for result in results],
    }


def to_json(report: dict[str, Any]) -> str:
    """JSON text; numbers that JSON cannot hold become text ("nan", "inf")."""
    return json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write to ``out`` by a rename (no reader sees half a report), or to stdout."""
    text = to_json(report)
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(out)


def progress(message: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"smoke: {message}\n")
    sys.stderr.flush()
