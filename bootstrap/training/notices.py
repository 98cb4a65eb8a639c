"""Notices that this node ends: files in one memory folder, shared by the node's watcher, the agent and the training.

drain            the node ends: "SAVE_BY SOURCE (DETAIL)", SAVE_BY in Unix seconds
drain.save       save a checkpoint now and go on; same format
drain.listener   a training process reads the notice itself
drain.saved      that process's answer: this node's share of the state is saved
drain.at-fault   a rank's settings are at fault; its launcher may hide the exit status
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap.training.environment import positive_number
from bootstrap.training.errors import AT_FAULT

DRAIN_FILE_VARIABLE = "GPUFLEET_DRAIN_FILE"
# systemd's 110 s (TimeoutStopSec), less up to 5 s until the watcher sees the notice (at most 120 s ahead) and up to
# 30 s in which torchrun ends its workers.
NOTICE_LIMIT_VARIABLE = "GPUFLEET_DRAIN_LIMIT_S"
NOTICE_LIMIT_S = 75.0
# Kept after the save: torchrun's 30 s, the terminate hook, the shutdown.
SPOT_RESERVE_S = 40.0
# A terminate hook waits while it gets heartbeats. Default: 500 GiB at 0.6 GiB/s.
HOOK_LIMIT_VARIABLE = "GPUFLEET_SCALE_IN_LIMIT_S"
HOOK_LIMIT_S = 900.0
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Reason to stop or to save; ``source``: a metadata path, a signal's name or ``drain-file``."""

    source: str
    detail: str
    save_by: float = NEVER

    def __str__(self) -> str:
        return f"{self.source} ({self.detail})" if self.detail else self.source


def notice_limit_s() -> float:
    """Seconds for the final checkpoint after a spot notice or a signal."""
    return positive_number(NOTICE_LIMIT_VARIABLE) or NOTICE_LIMIT_S


def hook_limit_s() -> float:
    """Seconds for the final checkpoint while a terminate hook holds the node."""
    return positive_number(HOOK_LIMIT_VARIABLE) or HOOK_LIMIT_S


class NoticeFiles:
    """The files of one node; ``path`` is the file ``drain``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        suffixes = (".save", ".listener", ".saved", AT_FAULT)
        self.save, self.listener, self.saved, self.at_fault = map(path.with_suffix, suffixes)

    @classmethod
    def from_environment(cls) -> NoticeFiles | None:
        """Files of the agent; None without it."""
        path = os.environ.get(DRAIN_FILE_VARIABLE)
        return cls(Path(path)) if path else None

    def write_stop(self, notice: Notice) -> None:
        """Announce the node's end; an earlier notice with less time stays."""
        if (current := self.read_stop()) is None or notice.save_by < current.save_by:
            self._write(self.path, notice)

    def read_stop(self) -> Notice | None:
        """Notice of the node's end; an unreadable file is a notice with the shorter limit."""
        return self._read(self.path, notice_limit_s())

    def write_save(self, notice: Notice) -> None:
        """Ask for a checkpoint now."""
        self._write(self.save, notice)

    def read_save(self) -> Notice | None:
        """Latest request for a checkpoint, or None."""
        notice = self._read(self.save, 0.0)
        return replace(notice, save_by=NEVER) if notice else None

    def clear(self) -> None:
        """Remove the files of an earlier start."""
        for path in (self.path, *self.path.parent.glob(f"{self.path.name}.*")):
            path.unlink(missing_ok=True)

    def _write(self, path: Path, notice: Notice) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_by = int(time.time() if notice.save_by == NEVER else notice.save_by)
        # Renamed: no reader sees half of the file.
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
