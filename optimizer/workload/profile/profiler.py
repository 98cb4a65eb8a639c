"""Front door of profiling: profile a function where torch is installed, read and write profiles; imports no torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from optimizer.contract.errors import DataMissingError, InvalidInputError, describe_invalid
from optimizer.workload.profile.records import ModuleProfile

INSTALL_TORCH = "pip install 'gpufleet[torch]'"
# gpufleet mcp sets False: its tools only read.
RUNS_FUNCTIONS = True


def is_function(text: str) -> bool:
    """Return True for the form "package.module:function"."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text) is not None


def profile_function(target: str, progress: Callable[[str], None] = lambda _: None) -> ModuleProfile:
    """Profile the module that a function builds; DataMissingError without a working torch."""
    if not RUNS_FUNCTIONS:
        raise InvalidInputError(
            f"the model {target} is a function",
            why="tools only read, and a function is code that would run",
            next_step=f"gpufleet profile {target} --out profile.json, then the model is profile.json",
        )
    if importlib.util.find_spec("torch") is None:
        raise _torch_needed(target, "torch is not installed", INSTALL_TORCH)
    try:
        from optimizer.workload.profile.measure import profile_module
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        next_step = f"{INSTALL_TORCH} in a fresh environment, or python -c 'import torch' to see the whole error"
        raise _torch_needed(target, f"torch cannot be imported: {error}", next_step) from error

    return profile_module(target, progress)


def _torch_needed(target: str, problem: str, next_step: str) -> DataMissingError:
    return DataMissingError(
        f"{target} is a function that builds a torch module, and {problem}",
        limit="torch in the Python that runs gpufleet",
        why="its own operators count parameters, FLOPs and memory",
        next_step=next_step,
    )


def parse_profile(data: Any, *, origin: str) -> ModuleProfile:
    """Validate ``data`` as a profile; InvalidInputError with every wrong field."""
    try:
        return ModuleProfile.model_validate(data)
    except ValidationError as error:
        raise InvalidInputError(
            f"{origin} is not a module profile:\n    " + "\n    ".join(describe_invalid(error)),
            limit="what gpufleet profile --format json prints (schema 1)",
            next_step="gpufleet profile MODULE:FUNCTION --out model.json",
        ) from error
