"""Every error that gpufleet raises on purpose, with the exit code of the command.

    GpufleetError               1  something failed while doing what was asked
    ├── InvalidInputError       2  the request, plan or file is wrong; the user must change it
    ├── NothingFeasibleError    3  the request is sound, and no fleet meets it
    └── DataMissingError        4  a price, a fact or a calibration is absent
        └── DataStaleError      4  the fact is there, and too old to spend money on

A message has four parts: the value got, the limit it broke, why the limit exists, and the next command to run.
"""

from __future__ import annotations

from pathlib import Path


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


def unreadable(path: Path, error: Exception) -> str:
    """Say that a file cannot be read, with its name once: an OSError's text has it too."""
    return f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
