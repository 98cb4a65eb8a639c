"""Errors of the training runtime, and the exit codes that the agent reads."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from bootstrap.contract.report import EXIT_AT_FAULT

# EX_TEMPFAIL ("try again later") and EX_SOFTWARE ("the program is at fault") of sysexits.h.
EXIT_INTERRUPTED = 75
EXIT_HUNG = 70
# Suffix of the file that a fault makes beside the file ``drain`` (notices.py).
AT_FAULT = ".at-fault"
_FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def tells_full_disk(problem: str) -> bool:
    """True where a rank's text says that a disk, or its user's part of one, is full."""
    return any(text in problem for text in _FULL_DISK)


class TrainingError(Exception):
    """Base of the runtime's errors."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, found or used; the message names it and the reason."""


class InvalidCheckpoint(CheckpointError):  # noqa: N818 - callers catch it and fall back to an older checkpoint
    """One checkpoint is torn, truncated or changed; an older one may be valid."""


class AlreadyExistsError(CheckpointError):
    """The store already holds this name, and nothing in it is overwritten."""


class ConfigurationError(TrainingError):
    """An argument or an environment variable that the run cannot honour.

    Uncaught, it ends the process with ``EXIT_AT_FAULT``, so that torchrun does not start it again.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if not isinstance(sys.excepthook, _FinalHook):
            sys.excepthook = _FinalHook(sys.excepthook)


class _FinalHook:
    """``sys.excepthook`` that shows an exception as the hook before it does, and makes a ConfigurationError final."""

    def __init__(self, show: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        self._show(kind, error, where)
        if isinstance(error, ConfigurationError):
            # accelerate and a torchrun below the node's end with 1, whatever their ranks' status.
            if files := os.environ.get("GPUFLEET_DRAIN_FILE"):
                with suppress(OSError):
                    Path(files).with_suffix(AT_FAULT).touch()
            # Python ends with the status of a SystemExit that its hook raises (CPython, pythonrun.c, _PyErr_PrintEx).
            sys.exit(EXIT_AT_FAULT)


class Interrupted(SystemExit):
    """A notice (``reason``) stopped the run after ``step``; exits with ``EXIT_INTERRUPTED`` unless caught."""

    def __init__(self, *, reason: str, step: int, saved: bool) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.reason = reason
        self.step = step
        self.saved = saved

    def __str__(self) -> str:
        return f"stopped after step {self.step} by {self.reason}, {'saved' if self.saved else 'NOT saved'}"
