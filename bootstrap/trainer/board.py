"""TensorBoard's event files, where it imports: written in a folder, copied to the store.

The store's objects never change, so a file is closed and copied every few minutes, and the next one begins;
TensorBoard reads the files of a folder one after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bootstrap.training.errors import AlreadyExistsError
from bootstrap.training.stores import Store

logger = logging.getLogger(__name__)

# Curves are copied to the store this often: a reclaim loses no more of them.
COPY_EVERY_S = 300.0
# For the last file of a run that ends.
LAST_COPY_S = 60.0


class Board:
    """Scalars of one run."""

    def __init__(self, folder: Path, store: Store | None, writer: Any) -> None:
        self._folder, self._store, self._make_writer = folder, store, writer
        self._writer: Any = None
        self._is_first = True
        self._since = 0.0
        self._copied: set[str] = set()
        self._copying: threading.Thread | None = None

    @classmethod
    def in_folder(cls, folder: Path, store: Store | None) -> Self | None:
        """Board that writes into ``folder``; None without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return cls(folder, store, SummaryWriter)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's values."""
        if self._writer is None:
            # TensorBoard drops what earlier files have from the first step on: a resume does these steps again.
            purge_step = step if self._is_first else None
            self._writer, self._since = self._make_writer(str(self._folder), purge_step=purge_step), time.monotonic()
            self._is_first = False
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if self._store is not None and time.monotonic() - self._since >= COPY_EVERY_S:
            self._end_file()

    def close(self) -> None:
        """Write and copy the last file."""
        self._end_file()
        if self._copying is not None:
            self._copying.join(LAST_COPY_S)

    def _end_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._store is None or (self._copying is not None and self._copying.is_alive()):
            return
        files = [path for path in sorted(self._folder.glob("events.*")) if path.name not in self._copied]
        self._copying = threading.Thread(target=self._copy, args=(self._store, files), name="tensorboard", daemon=True)
        self._copying.start()

    def _copy(self, store: Store, files: list[Path]) -> None:
        for path in files:
            name = f"{self._folder.name}/{path.name}"
            try:
                store.write(name, [path.read_bytes()])
            except AlreadyExistsError:
                pass  # a start before this one, on the same disk
            except Exception as error:  # noqa: BLE001 - curves are not worth a training; the next copy tries again
                logger.warning("%s/%s is not written: %s", store.uri, name, error)
                continue
            self._copied.add(path.name)
