"""Report of the smoke test, without torch."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bootstrap.contract.node_plan import Band

SCHEMA_VERSION = 4

Verdict = Literal["pass", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def find_low(values: Sequence[float], *, warn: float, fail: float) -> list[int]:
    """Indices of the values below ``fail``, or below ``warn`` where none fails."""
    low = [index for index, value in enumerate(values) if value < fail]
    return low or [index for index, value in enumerate(values) if value < warn]


def band_limits(band: Band | None) -> dict[str, Any]:
    """Limits of a result that a plan expects; none without a band."""
    return {"limit": band.fail_below, "warn": band.warn_below} if band else {}


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One measured value and its verdict; ``value`` is None where the test does not apply.

    Attributes:
        warn: limit that a value may miss with a warning.
        hosts: hosts to blame for a missed limit; empty where the measurement cannot tell.
    """

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    warn: float | None = None
    must_be: Literal["at_most", "at_least"]
    duration_s: float = 0.0
    note: str = ""
    hosts: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True where the value keeps its limit; NaN keeps none."""
        return self._keeps(self.limit)

    @property
    def verdict(self) -> Verdict:
        """Fail beyond ``limit``, warn beyond ``warn``."""
        return "fail" if not self.passed else "pass" if self._keeps(self.warn) else "warn"

    def _keeps(self, limit: float | None) -> bool:
        if self.value is None or limit is None:
            return self.value is None or math.isfinite(self.value)
        return self.value <= limit if self.must_be == "at_most" else self.value >= limit

    def as_dict(self) -> dict[str, Any]:
        """Fields of the report, in its order."""
        verdict = {"passed": self.passed, "verdict": self.verdict}
        return {"name": self.name, **verdict, **asdict(self), "duration_s": round(self.duration_s, 3)}


def build(
    *,
    started_at: str,
    arguments: dict[str, Any],
    error: str | None,
    duration_s: float = 0.0,
    facts: dict[str, Any] | None = None,
    results: Sequence[CheckResult] = (),
) -> dict[str, Any]:
    """Report as a dictionary; passes with results, all passed, and no error."""
    passed = error is None and bool(results) and all(result.passed for result in results)
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": passed,
        "verdict": max([result.verdict for result in results], key=VERDICTS.index) if passed else "fail",
        "error": error,
        "started_at": started_at,
        "duration_s": round(duration_s, 3),
        "arguments": arguments,
        **(facts or {}),
        "tests": [result.as_dict() for result in results],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write JSON to ``out`` by a rename (no reader sees half a report), or to stdout; not a number becomes text."""
    text = json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"
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
