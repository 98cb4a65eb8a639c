"""Tables of named entries that ship with gpufleet, kept by hand in TOML (performance/data, workload/data)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file by name; one that is ``like`` an earlier one has its values where it gives none."""
    found: dict[str, dict[str, Any]] = {}
    # The standard library reads TOML (https://docs.python.org/3/library/tomllib.html); importing PyYAML alone takes
    # longer than importing that and reading both files.
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        like = entry.pop("like", None)
        found[name] = entry if like is None else found[like] | entry
    return found
