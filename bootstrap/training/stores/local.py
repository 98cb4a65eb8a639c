"""Checkpoints in a directory, shared by all nodes of the run (FSx for Lustre, EFS)."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from bootstrap.training.errors import AlreadyExistsError, CheckpointError, InvalidCheckpoint
from bootstrap.training.stores.base import Buffer, byte_views, in_threads

BLOCK_BYTES = 16 * 2**20
# Offset, length and address of an O_DIRECT write: https://man7.org/linux/man-pages/man2/open.2.html (NOTES)
PAGE_BYTES = 4096


class LocalStore:
    """``Store`` in a directory; a hard link from an fsynced temporary file refuses to overwrite."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # a script may change its folder
        self.uri = str(root)
        self.buffer_bytes = 0

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """See ``Store.write``."""
        final = self.root / name
        temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_file(temporary, byte_views(parts))
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
            if final.parent != self.root:
                with suppress(OSError):  # others' files are in it
                    final.parent.rmdir()
            raise CheckpointError(f"cannot write {final}: {error}") from error

    def read(self, name: str) -> bytes:
        """See ``Store.read``."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.root / name}: {error}") from error

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """See ``Store.read_into``."""
        into = into.cast("B")
        try:
            with ExitStack() as stack:
                descriptor = os.open(self.root / name, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                in_threads(lambda block: _read_block(descriptor, *block), _blocks([into], offset))
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(name) from None
        except (OSError, EOFError) as error:
            kind = InvalidCheckpoint if isinstance(error, EOFError) else CheckpointError
            raise kind(f"cannot read {into.nbytes} bytes at {offset} of {self.root / name}: {error}") from error

    def names(self, prefix: str) -> list[str]:
        """See ``Store.names``; a folder removed meanwhile counts as empty."""
        top, names = prefix.partition("/")[0], []
        for folder, folders, files in os.walk(self.root, onerror=_refuse_unless_missing):
            if folder == str(self.root):  # others may be large or closed, as a file system's lost+found
                folders[:] = [name for name in folders if name.startswith(top)]
            names += [(Path(folder) / file).relative_to(self.root).as_posix() for file in files]
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


def _write_file(path: Path, views: list[memoryview]) -> None:
    """Write a new file in blocks from several threads, past the page cache where possible, and force it to the disk.

    O_DIRECT: half a host's memory full of dirty pages would be written after the last block only, and would push the
    data set out of the cache.
    """
    with ExitStack() as stack:
        buffered = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        stack.callback(os.close, buffered)
        descriptors = [buffered]
        if sum(view.nbytes for view in views) >= BLOCK_BYTES:
            with suppress(OSError):  # a file system without O_DIRECT
                descriptors.insert(0, os.open(path, os.O_WRONLY | os.O_DIRECT))
                stack.callback(os.close, descriptors[0])
        in_threads(lambda block: _write_block(descriptors, *block), _blocks(views))
        os.fsync(buffered)


def _blocks(views: Sequence[memoryview], offset: int = 0) -> list[tuple[memoryview, int]]:
    """Parts of a file's views, each with its offset in the file, which begins at ``offset``."""
    blocks = []
    for view in views:
        blocks += [(view[at : at + BLOCK_BYTES], offset + at) for at in range(0, view.nbytes, BLOCK_BYTES)]
        offset += view.nbytes
    return blocks


def _write_block(descriptors: list[int], block: memoryview, offset: int) -> None:
    """Write by the first descriptor what is aligned, and the rest by the last."""
    for descriptor in descriptors:
        is_direct = descriptor != descriptors[-1]
        while size := block.nbytes // PAGE_BYTES * PAGE_BYTES if is_direct else block.nbytes:
            try:
                written = os.pwrite(descriptor, block[:size], offset)
            except OSError as error:
                if is_direct and error.errno == errno.EINVAL:
                    break  # address or offset is not aligned
                raise
            block, offset = block[written:], offset + written


def _read_block(descriptor: int, block: memoryview, offset: int) -> None:
    while block.nbytes:
        read = os.preadv(descriptor, [block], offset)
        if not read:
            raise EOFError(f"it ends at byte {offset}")
        block, offset = block[read:], offset + read
