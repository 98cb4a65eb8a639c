"""The time, in a file of its own so that a test can put another in its place."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """The time, UTC."""
    return datetime.now(UTC)
