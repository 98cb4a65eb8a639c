"""Every error the training runtime raises on purpose, and the exit codes launch.sh reads.

TrainingError
├── CheckpointError          a checkpoint cannot be written, found or used
│   ├── InvalidCheckpoint    this one is torn, truncated or flipped; an older one may do
│   └── AlreadyExistsError   the store refused to overwrite
└── ConfigurationError       the run was given something it cannot honour
Interrupted (SystemExit 75)  the run was told to stop, and its state is saved
"""

from __future__ import annotations

# EX_TEMPFAIL and EX_SOFTWARE of sysexits.h: "try again later", and "the program is at fault".
EXIT_INTERRUPTED = 75
EXIT_HUNG = 70


class TrainingError(Exception):
    """Base of the runtime's errors."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, found or used; the message says which and why."""


class InvalidCheckpoint(CheckpointError):  # noqa: N818 - it names the thing, and callers fall back to an older one
    """One checkpoint fails its own manifest; an older one may do."""


class AlreadyExistsError(CheckpointError):
    """The store holds this name already: what is written is never overwritten."""


class ConfigurationError(TrainingError):
    """An argument or an environment variable that cannot be honoured."""


class Interrupted(SystemExit):
    """The run was told to stop; exits with ``EXIT_INTERRUPTED`` unless caught.

    Attributes:
        reason: what asked for the stop, like ``spot/instance-action``.
        step: completed steps.
        saved: whether a checkpoint of exactly ``step`` is committed.
    """

    def __init__(self, *, reason: str, step: int, saved: bool) -> None:
        super().__init__(EXIT_INTERRUPTED)
        self.reason = reason
        self.step = step
        self.saved = saved

    def __str__(self) -> str:
        return f"stopped after step {self.step} by {self.reason}, {'saved' if self.saved else 'NOT saved'}"
