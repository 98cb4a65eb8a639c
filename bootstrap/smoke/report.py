"""Results and report of the smoke test, without torch."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bootstrap.contract.node_plan import Band

SCHEMA_VERSION = 5

Verdict = Literal["pass", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


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
    must_be: Literal["at_most", "at_least"] = "at_least"
    note: str = ""
    hosts: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Fail beyond ``limit``, warn beyond ``warn``; a value that is not finite fails."""
        if self.value is None:
            return "pass"
        if not (math.isfinite(self.value) and self._keeps(self.value, self.limit)):
            return "fail"
        return "pass" if self._keeps(self.value, self.warn) else "warn"

    def _keeps(self, value: float, limit: float | None) -> bool:
        return limit is None or (value <= limit if self.must_be == "at_most" else value >= limit)


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write JSON to ``out`` by a rename (no reader sees half a report), or to stdout."""
    # JSON has no NaN and no infinity: they become text.
    text = json.dumps(json.loads(json.dumps(report), parse_constant=str), indent=2) + "\n"
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
