"""Contract of a checkpoint store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, cast

Buffer = bytes | bytearray | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")
# One thread does not fill an NVMe drive; more than four did not write faster (checksums_202611.md).
THREADS = 4


class Store(Protocol):
    """Named immutable objects, with ``/`` in names; a failed write, read or listing raises CheckpointError.

    ``write`` and ``read_into`` may be called from several threads at once. ``buffer_bytes`` is the most host memory
    that they take beside the caller's buffers, in one process.
    """

    buffer_bytes: int

    @property
    def uri(self) -> str:
        """Address for messages."""

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write an object, all or nothing, durably; AlreadyExistsError where ``name`` is taken.

        ``parts``: contiguous buffers, one after the other, which must not change until the call returns.
        """

    def read(self, name: str) -> bytes:
        """Whole content of a small object; FileNotFoundError where there is none."""

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the object's bytes from ``offset``; raises as ``read``; InvalidCheckpoint where short."""

    def names(self, prefix: str) -> list[str]:
        """Names that begin with ``prefix``, sorted."""

    def delete(self, name: str) -> None:
        """Remove an object that newer ones replace; a missing name is no error."""


def byte_views(parts: Sequence[Buffer]) -> list[memoryview]:
    """Parts that are not empty, as views of bytes."""
    views = [memoryview(part).cast("B") for part in parts]
    return [view for view in views if view.nbytes]


def in_threads(do: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of ``do`` for each item, from several threads; after an error no further item is begun.

    A task an item would keep the training from Python's lock for 20 ms while hundreds are handed out.
    """
    if len(items) < 2:
        return [do(item) for item in items]
    results: list[Result | None] = [None] * len(items)
    left = iter(range(len(items)))  # each thread takes the next

    def work(_: int) -> None:
        try:
            for index in left:
                results[index] = do(items[index])
        except BaseException:
            deque(left, maxlen=0)
            raise

    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as threads:
        list(threads.map(work, range(THREADS)))
    return cast(list[Result], results)
