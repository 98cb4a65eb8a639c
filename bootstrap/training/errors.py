"""Errors of the training runtime, and the exit codes that the agent reads."""

from __future__ import annotations

# EX_TEMPFAIL ("try again later") and EX_SOFTWARE ("the program is at fault") of sysexits.h.
EXIT_INTERRUPTED = 75
EXIT_HUNG = 70


class TrainingError(Exception):
    """Base of the runtime's errors."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, found or used; the message names it and the reason."""


class InvalidCheckpoint(CheckpointError):  # noqa: N818 - callers catch it and fall back to an older checkpoint
    """One checkpoint is torn, truncated or changed; an older one may be valid."""


class AlreadyExistsError(CheckpointError):
    """The store already holds this name, and nothing in it is overwritten."""


class ConfigurationError(TrainingError):
    """An argument or an environment variable that the run cannot honour."""


class Interrupted(SystemExit):
    """A notice (``reason``) stopped the run after ``step``; exits with ``EXIT_INTERRUPTED`` unless caught."""

    def __init__(self, *, reason: str, step: int, saved: bool) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.reason = reason
        self.step = step
        self.saved = saved

    def __str__(self) -> str:
        return f"stopped after step {self.step} by {self.reason}, {'saved' if self.saved else 'NOT saved'}"
