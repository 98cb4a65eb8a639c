"""``--calibration``, shared by the commands that predict speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optimizer.errors import DataMissingError, InvalidInputError

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
        InvalidInputError: the file is missing or no calibration.
        DataMissingError: the shipped one is.
    """
    from optimizer.performance.calibration import load, read_calibration

    if path is None:
        return load()
    try:
        return read_calibration(path)
    except (DataMissingError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise InvalidInputError(
            f"--calibration {path} cannot be used: {reason}",
            limit="a file that gpufleet calibrate wrote with this version",
            why="without a calibration every speed would be a guess",
            next_step="gpufleet calibrate RUNS.csv --out FILE writes one; without --calibration the shipped one serves",
        ) from error
