"""Every error that gpufleet raises on purpose, with the exit code of the command.

    GpufleetError               1  something failed while doing what was asked
    ├── InvalidInputError       2  the request, plan or file is wrong; the user must change it
    ├── NothingFeasibleError    3  the request is sound, and no fleet meets it
    └── DataMissingError        4  a price, a fact or a calibration is absent
        └── DataStaleError      4  the fact is there, and too old to spend money on

A message has four parts: the value got, the limit it broke, why the limit exists, and the next command to run.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootstrap.contract.words import counted

if TYPE_CHECKING:
    from pydantic import ValidationError


class GpufleetError(Exception):
    """Base of all errors meant for the user; ``got`` is the wrong thing with its value ("--budget is -5 USD")."""

    exit_code = 1

    def __init__(self, got: str, *, limit: str = "", why: str = "", next_step: str = "") -> None:
        self.got, self.limit, self.why, self.next_step = got, limit, why, next_step
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.got]
        if self.limit:
            parts.append(f"limit: {self.limit}")
        if self.why:
            parts.append(f"why: {self.why}")
        if self.next_step:
            parts.append(f"next: {self.next_step}")
        return "\n  ".join(parts)


class InvalidInputError(GpufleetError):
    """A flag, file, request or plan that no data could make right."""

    exit_code = 2


class NothingFeasibleError(GpufleetError):
    """No fleet meets the budget, the deadline and the memory at once."""

    exit_code = 3


class DataMissingError(GpufleetError):
    """A fact the answer needs is not in the catalog or the calibration."""

    exit_code = 4


class DataStaleError(DataMissingError):
    """The fact is there and older than its time to live."""


# Words for what a value lacks, by pydantic's type of error; the names in braces are of its context.
_WRONG = {
    "missing": "missing",
    "extra_forbidden": "no such key",
    "unexpected_keyword_argument": "no such key",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must not be empty",
}
_KINDS = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
    "string": "a text", "list": "a list", "tuple": "a list", "dict": "a mapping", "model": "a mapping",
    "dataclass": "a mapping", "date": "a date", "datetime": "a time with its zone", "timezone": "a time with its zone",
    "path": "a path",
}  # fmt: skip


def shown(value: Any) -> str:
    """The beginning of a wrong value: seven lines of YAML aliases can hold a million values."""
    if isinstance(value, date):
        return str(value)
    short = reprlib.Repr()
    short.maxlevel, short.maxstring = 2, 100
    return short.repr(value)


def describe_invalid(
    error: ValidationError, *, within: str = "", hint: Callable[[Mapping[str, Any]], str] = lambda _: ""
) -> list[str]:
    """Say of each value that pydantic refused its place ``within`` what was read, what is needed and what was given."""
    lines = []
    for problem in error.errors():
        value = problem.get("input")
        if problem["type"] == "too_short" and value:
            continue  # its items were wrong, and have lines of their own
        place = ".".join([*([within] if within else []), *map(str, problem["loc"])])
        wrong, got = describe_wrong(problem), shown(value)
        if problem["type"] == "missing" or isinstance(value, dict) or got in wrong:
            got = ""
        lines.append(f"{place}: {wrong}{got and f' (got {got})'}{hint(problem)}".removeprefix(": "))
    return list(dict.fromkeys(lines))


def describe_wrong(problem: Mapping[str, Any]) -> str:
    """Say what is wrong with a value that pydantic refused, in the words of a request and never in pydantic's."""
    kind = str(problem["type"])
    if kind in ("too_short", "too_long"):
        few = kind == "too_short"
        limit = problem["ctx"]["min_length" if few else "max_length"]
        return f"must have at {'least' if few else 'most'} {counted(limit, 'entry', 'entries')}"
    if kind in _WRONG:
        limits = problem.get("ctx", {}).items()
        return _WRONG[kind].format(
            **{name: f"{value:,g}" if isinstance(value, float) else value for name, value in limits}
        )
    if needed := _KINDS.get(kind.split("_")[0]):
        return f"{needed} is needed"
    return str(problem["msg"]).removeprefix("Value error, ") if kind == "value_error" else "is of another kind"


def unreadable(path: Path, error: Exception) -> str:
    """Say that a file cannot be read, with its name once: an OSError's text has it too."""
    return f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
