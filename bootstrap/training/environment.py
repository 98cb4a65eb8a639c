"""Numbers and the plan from environment variables; a wrong value is an error, never a silent default."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from bootstrap.contract.codec import FormatError
from bootstrap.contract.node_plan import NodePlan, read_node_plan
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


def node_plan(environment: Mapping[str, str] | None = None) -> NodePlan | None:
    """The node's plan, None without one; ConfigurationError where its variable cannot be read."""
    try:
        return read_node_plan(os.environ if environment is None else environment)
    except FormatError as error:
        raise ConfigurationError(str(error)) from error
