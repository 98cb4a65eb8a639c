"""Where catalog facts come from: one source a file, each with a pure parser and, where AWS has a call, a fetch.

Both the shipped snapshot and `gpufleet catalog refresh` go through the same parsers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row a source could not use: where it stood and why."""

    source: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, {self.place}: {self.reason}"


class UnusableRowError(ValueError):
    """A row that is malformed or of a kind the catalog does not hold; the message says why."""
