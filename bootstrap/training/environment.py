"""Numbers from environment variables; a value that is not one is an error, never a silent default."""

from __future__ import annotations

import math
import os

from bootstrap.training.errors import ConfigurationError


def seconds_from_environment(variable: str) -> float | None:
    """Seconds above zero, or None where the variable is unset or empty.

    Raises:
        ConfigurationError: anything else.
    """
    return _positive(variable, "seconds above 0")


def usd_per_hour_from_environment(variable: str) -> float | None:
    """USD per hour above zero, or None where the variable is unset or empty.

    Raises:
        ConfigurationError: anything else.
    """
    return _positive(variable, "USD per hour of the whole fleet, above 0")


def count_from_environment(variable: str) -> int | None:
    """A whole number above zero, or None where the variable is unset or empty.

    Raises:
        ConfigurationError: anything else.
    """
    value = _positive(variable, "a whole number above 0")
    if value is not None and value != int(value):
        raise ConfigurationError(f"{variable} is {os.environ[variable]!r}; expected a whole number above 0")
    return None if value is None else int(value)


def _positive(variable: str, expected: str) -> float | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{variable} is {text!r}; expected {expected}")
    return value
