"""The notes between the node's watcher, launch.sh and the training processes: small files in one folder of memory.

    drain            this node is leaving: "SAVE_BY SOURCE (DETAIL)", SAVE_BY in Unix seconds
    drain.save       a checkpoint is wanted now, and training goes on; the notice as above
    drain.listener   a training process answers the drain by itself
    drain.saved      its answer: this node's share of the state is safe

How long the final checkpoint may take is decided here, once, when the drain is asked for; all others read it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.training.environment import seconds_from_environment

DRAIN_FILE_VARIABLE = "GPUFLEET_DRAIN_FILE"
# A spot notice comes 120 s ahead at best, and systemd stops the service within 110 s (TimeoutStopSec). Of these up to
# 5 s are for noticing it and 30 s for torchrun to end its workers.
NOTICE_LIMIT_VARIABLE = "GPUFLEET_DRAIN_LIMIT_S"
NOTICE_LIMIT_S = 75.0
# What must be left of the two minutes when the state is saved: torchrun's 30 s, the terminate hook, the shutdown.
SPOT_RESERVE_S = 40.0
# A terminate hook waits as long as it gets heartbeats, so this is for the state alone. On a fleet node.env has the
# plan's own; without it, 500 GiB at 0.6 GiB/s.
HOOK_LIMIT_VARIABLE = "GPUFLEET_SCALE_IN_LIMIT_S"
HOOK_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One reason to act.

    Attributes:
        source: the metadata path, the signal's name or ``drain-file``.
        detail: what came with it, for the log.
        save_by: Unix seconds at which the state must be saved; infinite where nothing is about to end.
    """

    source: str
    detail: str
    save_by: float = float("inf")

    def __str__(self) -> str:
        return f"{self.source} ({self.detail})" if self.detail else self.source


def notice_limit_s() -> float:
    """Seconds for the final checkpoint after a spot notice or a signal."""
    return seconds_from_environment(NOTICE_LIMIT_VARIABLE) or NOTICE_LIMIT_S


def hook_limit_s() -> float:
    """Seconds for the final checkpoint while a terminate hook holds the machine."""
    return seconds_from_environment(HOOK_LIMIT_VARIABLE) or HOOK_LIMIT_S


class DrainFile:
    """The files of one node; ``path`` is that of the drain itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def from_environment(cls) -> DrainFile | None:
        """launch.sh's, or None where it did not start this process."""
        path = os.environ.get(DRAIN_FILE_VARIABLE)
        return cls(Path(path)) if path else None

    def ask(self, notice: Notice) -> None:
        """This node is leaving; of two notices the one with less time holds."""
        before = self.read()
        if before is None or notice.save_by < before.save_by:
            self._write(self.path, notice)

    def read(self) -> Notice | None:
        """What was asked for, or None; a file that cannot be understood asks for the shorter drain."""
        return self._read(self.path, notice_limit_s())

    def ask_save(self, notice: Notice) -> None:
        """A checkpoint is wanted now."""
        self._write(self._beside("save"), notice)

    def read_save(self) -> Notice | None:
        """The last notice that wanted a checkpoint, or None."""
        found = self._read(self._beside("save"), 0.0)
        return replace(found, save_by=float("inf")) if found else None

    def listen(self) -> None:
        """The calling process will answer with ``saved``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._beside("listener").touch()

    def stop_listening(self) -> None:
        """It will not any more."""
        self._beside("listener").unlink(missing_ok=True)

    def saved(self) -> None:
        """This node's share of the state is safe; means nothing where the node is not leaving."""
        if self.path.exists():
            self._beside("saved").touch()

    def _beside(self, what: str) -> Path:
        return self.path.with_suffix(f".{what}")

    def _write(self, path: Path, notice: Notice) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_by = int(notice.save_by) if notice.save_by != float("inf") else int(time.time())
        # By a rename: a reader never sees half of it.
        new = path.with_suffix(f"{path.suffix}.{os.getpid()}.new")
        new.write_text(f"{save_by} {notice}\n", encoding="utf-8")
        new.replace(path)

    def _read(self, path: Path, limit_s: float) -> Notice | None:
        try:
            text, written_at = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
        except FileNotFoundError:
            return None
        save_by, _, reason = text.strip().partition(" ")
        if not save_by.isdecimal() or not reason:
            return Notice(source="drain-file", detail=str(path), save_by=written_at + limit_s)
        source, _, detail = reason.partition(" (")
        return Notice(source=source, detail=detail.removesuffix(")"), save_by=float(save_by))
