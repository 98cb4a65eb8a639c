"""Counts in messages."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: "1 step", "1,908 steps"; ``plural`` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
