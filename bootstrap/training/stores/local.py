"""Checkpoints in a directory, shared by all nodes of the run (FSx for Lustre, EFS)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bootstrap.training.errors import AlreadyExistsError, CheckpointError
from bootstrap.training.stores.base import Digest, Fill, fill_file


class LocalStore:
    """``Store`` in a directory; a hard link from an fsynced temporary file refuses to overwrite."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def write(self, name: str, fill: Fill) -> Digest:
        """See ``Store.write``."""
        final = self.root / name
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                digest = fill_file(temporary, fill)
                try:
                    os.link(temporary, final)
                except FileExistsError as error:
                    raise AlreadyExistsError(f"{final} exists, and a checkpoint is never overwritten") from error
            finally:
                temporary.unlink(missing_ok=True)
            for folder in (final.parent, self.root):  # keeps the name in a power cut
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot write {final}: {error}") from error
        return digest

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.root / name}: {error}") from error

    @contextmanager
    def fetch(self, name: str) -> Iterator[Path]:
        """See ``Store.fetch``."""
        path = self.root / name
        if not path.is_file():
            raise FileNotFoundError(name)
        yield path

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``; a folder removed meanwhile counts as empty."""
        names = (
            (Path(folder) / file).relative_to(self.root).as_posix()
            for folder, _, files in os.walk(self.root, onerror=_refuse_unless_missing)
            for file in files
        )
        return sorted(name for name in names if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See ``Store.delete``; removes the folder with its last file."""
        path = self.root / name
        path.unlink(missing_ok=True)
        if path.parent != self.root:
            with suppress(OSError):
                path.parent.rmdir()


def _refuse_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise CheckpointError(f"{error.filename} cannot be listed: {error.strerror}") from error
