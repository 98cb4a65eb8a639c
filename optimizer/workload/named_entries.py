"""Reader of the hand-kept TOML tables of named entries (performance/data, workload/data)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of a file by name; ``like`` names an earlier entry whose values fill the gaps."""
    entries: dict[str, dict[str, Any]] = {}
    # TOML, because importing PyYAML alone takes longer than importing tomllib and reading both files.
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        like = entry.pop("like", None)
        entries[name] = entry if like is None else entries[like] | entry
    return entries
