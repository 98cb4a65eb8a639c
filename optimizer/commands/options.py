"""``--calibration``, shared by the commands that predict speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from optimizer.performance.calibration import Calibration

F = TypeVar("F", bound=Callable[..., Any])


def calibration_option(function: F) -> F:
    """Add ``--calibration``, passed to the command as ``calibration``: a path or None."""
    return click.option(
        "--calibration",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Calibration that gpufleet calibrate wrote, for the shipped one.",
    )(function)


def chosen_calibration(path: Path | None) -> Calibration:
    """The calibration of a file, or the shipped one where none is named.

    Raises:
        DataMissingError: the file is missing or no calibration.
    """
    from optimizer.performance.calibration import load, read_calibration

    return load() if path is None else read_calibration(path)
