"""Contract of a checkpoint store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

# Writes an object's content into a file.
Fill = Callable[[BinaryIO], object]


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Size and SHA-256 of an object."""

    bytes: int
    sha256: str


class Store(Protocol):
    """Named immutable objects, with ``/`` in names; a failed write, read or listing raises CheckpointError."""

    @property
    def uri(self) -> str:
        """Address for messages."""

    def write(self, name: str, fill: Fill) -> Digest:
        """Write an object, all or nothing, durably; AlreadyExistsError where ``name`` is taken."""

    def read(self, name: str) -> bytes:
        """Whole content of a small object; FileNotFoundError where there is none."""

    def fetch(self, name: str) -> AbstractContextManager[Path]:
        """Context manager of a local path with the content; raises as ``read``."""

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``, sorted."""

    def delete(self, name: str) -> None:
        """Remove an object; a missing name is no error."""


class _HashingFile:
    """Binary file that hashes its content; has the methods that ``torch.save`` calls."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.bytes += memoryview(data).nbytes
        return self._file.write(data)


def fill_file(path: Path, fill: Fill) -> Digest:
    """Write a new file and force it to the disk."""
    with path.open("xb") as file:
        hashing = _HashingFile(file)
        fill(cast(BinaryIO, hashing))
        file.flush()
        os.fsync(file.fileno())
    return Digest(bytes=hashing.bytes, sha256=hashing.sha256.hexdigest())


def file_digest(path: Path) -> Digest:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Digest(bytes=file.tell(), sha256=sha256)
