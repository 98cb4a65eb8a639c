"""Requirements locked by version and hash, in pip's format: read, and split from the packages that the image brings.

``python3 -m bootstrap.contract.requirements TORCH OWN`` prints file OWN without the packages of file TORCH.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# One row: name, extras, version, marker, hashes. https://pip.pypa.io/en/stable/topics/secure-installs/#hash-checking-mode
_ROW = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[\w., -]*\])?==(?P<version>[\w.+!-]+)\s*(;[^\\]*?)?"
    r"(\s+--hash=sha256:[0-9a-f]{64})+\s*"
)


@dataclass(frozen=True)
class Pin:
    """One locked package: its normalised name, version, and the row as it was written."""

    name: str
    version: str
    row: str


def normalised(name: str) -> str:
    """Name in the form that compares equal: https://packaging.python.org/en/latest/specifications/name-normalization/."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> Iterator[Pin]:
    """Read each requirement; a row that is no ``name==version`` with SHA-256 hashes raises ValueError."""
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text)).splitlines():
        if not line.strip():
            continue
        match = _ROW.fullmatch(line.strip())
        if match is None:
            raise ValueError(
                f"{' '.join(line.split())[:100]!r} is no name==version with --hash=sha256:... of its files"
            )
        yield Pin(normalised(match["name"]), match["version"], " ".join(line.split()))


def without(own: str, others: str) -> str:
    """Return the rows of ``own`` whose packages are not in ``others``."""
    names = {pin.name for pin in read_pins(others)}
    return "".join(f"{pin.row}\n" for pin in read_pins(own) if pin.name not in names)


if __name__ == "__main__":
    torch, own = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])
    sys.stdout.write(without(own, torch))
