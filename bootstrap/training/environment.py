"""Numbers from environment variables; a value that is no number is an error, never a silent default."""

from __future__ import annotations

import math
import os

from bootstrap.training.errors import ConfigurationError

INTERVAL_VARIABLE = "GPUFLEET_CHECKPOINT_INTERVAL_S"
DEFAULT_INTERVAL_S = 600.0


def checkpoint_interval(given_s: float | None) -> float:
    """Seconds between checkpoints: the caller's, the variable's, or the default."""
    return given_s or positive_number(INTERVAL_VARIABLE) or DEFAULT_INTERVAL_S


def positive_number(variable: str, meaning: str = "seconds") -> float | None:
    """Number above 0 of ``variable``, or None where it is unset or empty; ConfigurationError for anything else."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{variable} is {text!r}; expected {meaning} above 0")
    return value


def positive_count(variable: str) -> int | None:
    """Whole number above 0 of ``variable``, or None; raises as ``positive_number``."""
    value = positive_number(variable, "a whole number")
    if value is not None and value != int(value):
        raise ConfigurationError(f"{variable} is {os.environ[variable]!r}; expected a whole number above 0")
    return None if value is None else int(value)
