"""The bootstrap package as one archive, named by its digest: a node runs exactly the version its template names."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

ENTRY_POINT = "bootstrap/node_init.sh"
SOURCE = Path(__file__).resolve().parents[1] / "bootstrap"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A tar.gz of the bootstrap package.

    Attributes:
        content: the archive.
        sha256: its digest, hexadecimal.
    """

    content: bytes
    sha256: str


def build(source: Path = SOURCE) -> Bundle:
    """Pack ``source`` as ``bootstrap/``: the same files give the same bytes, whoever packs them and when.

    Raises:
        FileNotFoundError: ``source`` has no node_init.sh, so a node would have nothing to run.
    """
    if not (source / "node_init.sh").is_file():
        raise FileNotFoundError(f"{source}/node_init.sh is missing: install gpufleet with its bootstrap package")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(source.rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts or path.suffix == ".pyc":
                continue
            data = path.read_bytes()
            # TarInfo's defaults are what makes it reproducible: no owner, no times.
            entry = tarfile.TarInfo(f"bootstrap/{path.relative_to(source).as_posix()}")
            entry.size = len(data)
            entry.mode = 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(data))
    compressed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=compressed, mtime=0) as stream:
        stream.write(packed.getvalue())
    content = compressed.getvalue()
    return Bundle(content=content, sha256=hashlib.sha256(content).hexdigest())
