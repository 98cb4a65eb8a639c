"""Sources that ``catalog refresh`` reads: one a file, with a fetch and a pure parser.

tools/build_snapshot.py makes the shipped snapshot, with the same parsers where it has AWS's own answers.
"""

from __future__ import annotations

from typing import NamedTuple


class Skipped(NamedTuple):
    """An unusable row of a source, or a source that did not answer in a region; its place and the reason."""

    source: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, {self.place}: {self.reason}"


class UnusableRowError(ValueError):
    """A row that is malformed or of a kind the catalog does not hold; the message says why."""
