"""Writing of a generated file, or with ``--check`` the comparison with the committed one."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str, *, source: str) -> None:
    """Write ``text``; with --check exit instead where the file differs. ``source``: what it is generated from."""
    if "--check" not in sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{path.name} has drifted from {source}: run `make docs` and commit it")
