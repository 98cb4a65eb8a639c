"""Folders as archives named by their digest: a node runs exactly the version its launch template names."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENTRY_POINT = "bootstrap/node_init.sh"
CONTROLLER_HANDLER = "bootstrap.controller.handler.handler"
SOURCE = Path(__file__).resolve().parents[1] / "bootstrap"


@dataclass(frozen=True)
class Bundle:
    """An archive with its digest, hexadecimal."""

    content: bytes

    @property
    def sha256(self) -> str:
        """Digest of the content."""
        return hashlib.sha256(self.content).hexdigest()


def build(source: Path = SOURCE, *, requirements: Path | None = None) -> Bundle:
    """Pack the nodes' part of the bootstrap package; a new controller or README.md changes no node.

    ``requirements`` (gpufleet:requirements) goes along, so that the bundle's digest vouches for its hashes.
    """
    own = {"requirements-own.txt": requirements} if requirements else {}
    return pack(source, "bootstrap", without=("controller", "README.md"), more=own)


def files_of(source: Path) -> list[Path]:
    """The files of a folder that belong into an archive: no caches, nothing hidden (.git, .env), no links."""
    return [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not path.is_symlink()
        if not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(source).parts)
    ]


def pack(source: Path, root: str, *, without: tuple[str, ...] = (), more: Mapping[str, Path] | None = None) -> Bundle:
    """Pack a folder's files under ``root/``, byte for byte the same: without some files and folders, with ``more``."""
    files = {path.relative_to(source).as_posix(): path for path in files_of(source)}
    files = {name: path for name, path in files.items() if set(without).isdisjoint(name.split("/"))}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, path in (files | dict(more or {})).items():
            data = path.read_bytes()
            # TarInfo's defaults make the archive reproducible: no owner, no times.
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(data)
            entry.mode = 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(data))
    compressed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=compressed, mtime=0) as stream:
        stream.write(packed.getvalue())
    return Bundle(compressed.getvalue())


def controller(source: Path = SOURCE) -> Bundle:
    """The controller's Python code as a zip for Lambda: the same files give the same bytes."""
    files = [source / "__init__.py", *files_of(source / "contract"), *files_of(source / "controller")]
    packed = io.BytesIO()
    # Stored, because a compressor's output depends on its version; ZipInfo's time is 1980 unless told.
    with zipfile.ZipFile(packed, mode="w", compression=zipfile.ZIP_STORED) as archive:
        for path in files:
            if path.suffix == ".py":
                entry = zipfile.ZipInfo(f"bootstrap/{path.relative_to(source).as_posix()}")
                # Lambda runs the code as another user, who must be able to read it.
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, path.read_bytes())
    return Bundle(packed.getvalue())
