"""Contract of a checkpoint store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

Buffer = bytes | bytearray | memoryview
# Writes an object's content into a file.
Fill = Callable[[BinaryIO], object]


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Size and SHA-256 of an object."""

    bytes: int
    sha256: str


class Store(Protocol):
    """Named immutable objects, with ``/`` in names; a failed write, read or listing raises CheckpointError.

    ``write`` and ``read_into`` may be called from several threads at once. ``buffer_bytes`` is the most host memory
    that they take beside the caller's buffers, in one process.
    """

    buffer_bytes: int

    @property
    def uri(self) -> str:
        """Address for messages."""

    def write(self, name: str, parts: Any) -> Digest:
        """Write an object, all or nothing, durably; AlreadyExistsError where ``name`` is taken.

        ``parts``: contiguous buffers, one after the other, which must not change until the call returns.
        """

    def read(self, name: str) -> bytes:
        """Whole content of a small object; FileNotFoundError where there is none."""

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the object's bytes from ``offset``; raises as ``read``; InvalidCheckpoint where short."""

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


def byte_views(parts: Sequence[Buffer]) -> list[memoryview]:
    """Parts that are not empty, as views of bytes."""
    views = [memoryview(part).cast("B") for part in parts]
    return [view for view in views if view.nbytes]
