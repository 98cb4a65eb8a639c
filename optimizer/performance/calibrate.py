"""Fit the calibration to measured runs (`gpufleet calibrate`).

fit.py has the fit itself; this file reads the runs and works out how far the fit's predictions are from runs it never
saw, which is the error every estimate carries. adapt.py starts from a fitted calibration instead.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.hardware import Gpu
from optimizer.performance.calibration import (
    KINDS,
    NEW_FRAMEWORK,
    POOLED,
    Calibration,
    Residual,
    die,
    model_kind,
    residual_key,
)
from optimizer.performance.evaluate import evaluate_inputs
from optimizer.performance.fit import fit_coefficients
from optimizer.performance.frameworks import framework_name
from optimizer.performance.inputs import stack
from optimizer.performance.runs import RowRun, read_row, row_error
from optimizer.performance.types import Estimates, Floats

RUNS = Path(__file__).parent / "data" / "measured_runs.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured run."""

    row_id: str
    suite: str
    run: RowRun
    tokens_per_second_per_gpu: float
    peak_memory_gib: float | None
    line: int = 0

    @property
    def step_time_s(self) -> float:
        """Measured time of one optimizer step, from the throughput."""
        grid = self.run.grid
        samples = float(np.asarray(grid.data) * np.asarray(grid.micro_batch) * np.asarray(grid.grad_accum))
        return samples * self.run.recipe.seq_len / (self.tokens_per_second_per_gpu * self.run.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A line of a file of runs that no fit can use, and why."""

    line: int
    reason: str


def read_runs(path: Path, gpus: Mapping[str, Gpu]) -> list[Measured]:
    """Read measured runs, all of them.

    Raises:
        InvalidInputError: the file cannot be read, a row cannot be estimated or has no throughput, or there is none.
    """
    rows, refused, _ = read_usable_runs(path, gpus)
    if refused:
        raise InvalidInputError(
            f"{path} line {refused[0].line}: {refused[0].reason}",
            limit="a run with its throughput",
            why="a calibration never skips a measurement silently",
            next_step="mend or remove the line",
        )
    if not rows:
        raise InvalidInputError(f"{path} holds no rows", limit="at least one measured run")
    return rows


def read_usable_runs(path: Path, gpus: Mapping[str, Gpu]) -> tuple[list[Measured], list[Refused], list[str]]:
    """Read the measured runs that can be used.

    Returns:
        The runs; the lines that are none, with the reason; the columns that hold something nothing reads.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    rows: list[Measured] = []
    refused = []
    filled: set[str] = set()
    used = set(BESIDES)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            columns = list(reader.fieldnames or [])
            for cells in reader:
                row = _Noting(cells)
                try:
                    rows.append(_measured(row, gpus, reader.line_num))
                    filled |= {name for name, cell in cells.items() if cell}
                    used |= row.read
                except GpufleetError as error:
                    refused.append(Refused(line=reader.line_num, reason=row_error(error)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {error}",
            next_step="gpufleet calibrate --template prints the columns and an example",
        ) from error
    return rows, refused, [name for name in columns if name in filled - used]


# Columns that tell a reader about a run, and decide nothing.
BESIDES = (
    "row_id", "suite", "model", "source", "tokens_per_second_per_gpu", "peak_memory_gib", "memory_kind",
    "reserved_memory_gib",
)  # fmt: skip


class _Noting(dict[str, str]):
    """A row that notes which columns were read: a misspelt one would be taken for its default without a word."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        super().__init__(cells)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The cell, as dict.get."""
        self.read.add(key)
        return super().get(key, default)


def _measured(row: Mapping[str, str], gpus: Mapping[str, Gpu], line: int) -> Measured:
    """One row.

    Raises:
        GpufleetError: it cannot be estimated, or its throughput or peak is no positive number.
    """
    run = read_row(row, gpus)
    return Measured(
        row_id=row.get("row_id") or str(line),
        suite=row.get("suite") or "",
        run=run,
        tokens_per_second_per_gpu=_positive(row, "tokens_per_second_per_gpu"),
        peak_memory_gib=_positive(row, "peak_memory_gib") if row.get("peak_memory_gib") else None,
        line=line,
    )


def _positive(row: Mapping[str, str], column: str) -> float:
    text = row.get(column) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidInputError(f"{column} is {text or 'empty'}", limit="a measured number above 0")
    return value


def predict(rows: Sequence[Measured], calibration: Calibration, *, new_gpus: bool = False) -> Estimates:
    """Estimates of the rows, in their order; with ``new_gpus`` as if nobody had seen their GPUs at the power limit."""
    x = stack([row.run.inputs(calibration.coefficients(row.run.hardware.gpu, row.run.recipe)) for row in rows])
    return evaluate_inputs(replace(x, throttling=np.zeros(len(rows))) if new_gpus else x)


def log_errors(rows: Sequence[Measured], calibration: Calibration, *, new_gpus: bool = False) -> Floats:
    """log(predicted / measured) step time of each row; ``new_gpus`` as ``predict`` has it."""
    measured = np.array([row.step_time_s for row in rows])
    return np.asarray(np.log(predict(rows, calibration, new_gpus=new_gpus).step_time_s / measured))


def throughput_error(log_error: Floats) -> Floats:
    """Relative error of predicted throughput from log(predicted / measured) step time."""
    return np.asarray(np.exp(-log_error) - 1)


# No GPU that nobody measured is surer than this: two kinds of data-centre GPU, of which each predicts the other, say
# little of a 72 W L4, however well they are met.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# A few rows that happen to be met well do not prove a small error: a GPU's is drawn to that of all rows as if so many
# more had been measured on it.
DRAWN_ROWS = 20


def fit(rows: Sequence[Measured], *, source: str, as_of: date, command: str) -> Calibration:
    """Fit a calibration to ``rows``, with residuals by GPU and, for other GPUs, from leaving one processor out.

    Raises:
        InvalidInputError: there are no rows.
    """
    if not rows:
        raise InvalidInputError("no measured runs", limit="at least one")
    fitted = fit_rows(rows)
    errors = cross_validated_errors(rows)
    keys = [residual_key(row.run.hardware.gpu, row.run.recipe.precision, row.run.recipe.framework) for row in rows]
    residuals = {}
    for key in sorted(set(keys)):
        own_errors = errors[[index for index, own_key in enumerate(keys) if own_key == key]]
        drawn = math.sqrt((np.sum(own_errors**2) + DRAWN_ROWS * _rms(errors) ** 2) / (len(own_errors) + DRAWN_ROWS))
        residuals[key] = Residual(rows=len(own_errors), relative_error=round(drawn, 4))
    processors = [die(row.run.hardware.gpu) for row in rows]
    frameworks = [framework_name(row.run.recipe.framework) for row in rows]
    for name, own, other in ((POOLED, processors, frameworks), (NEW_FRAMEWORK, frameworks, processors)):
        error = _error_of_a_new_one(_left_out_errors(rows, own, other, new_gpus=name == POOLED))
        error = max(error, LEAST_ERROR_OF_A_NEW_GPU) if name == POOLED else error
        residuals[name] = Residual(rows=0, relative_error=round(error, 4))
    for kind in KINDS:
        its = [float(error) for row, error in zip(rows, errors, strict=True) if model_kind(row.run.model) == kind]
        residuals[kind] = Residual(rows=len(its), relative_error=round(_error_of_a_new_one(its), 4))
    update = {"residuals": residuals, "source": source, "as_of": as_of, "command": command}
    return fitted.model_copy(update=update)


def _left_out_errors(
    rows: Sequence[Measured], own: Sequence[str], other: Sequence[str], *, new_gpus: bool
) -> list[float]:
    """Error of predicting each kind of ``own`` (the rows' processors, say) from a fit to the rest.

    What one new kind adds: only its rows whose ``other`` kind (framework, say) the rest knows. With ``new_gpus`` what
    kernels.py says of the power limit of the processor left out is left out too.
    """
    found = []
    for kind in sorted(set(own)):
        known = {name for name, its in zip(other, own, strict=True) if its != kind}
        rest = [row for row, its in zip(rows, own, strict=True) if its != kind]
        left = [row for row, its, name in zip(rows, own, other, strict=True) if its == kind and name in known]
        if left and rest:
            found.append(_rms(log_errors(left, fit_rows(rest), new_gpus=new_gpus)))
    return found


def fit_rows(rows: Sequence[Measured]) -> Calibration:
    """A calibration fitted to ``rows`` to predict others with; it has no residuals."""
    values = fit_coefficients([row.run for row in rows], [row.step_time_s for row in rows], [row.suite for row in rows])
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    return Calibration(**values, residuals=nothing, rows=len(rows), source="", as_of=date.min, command="")


FOLDS = 8


def folds(rows: Sequence[Measured]) -> list[list[int]]:
    """Positions of the rows in at most FOLDS parts, all rows of one model of one suite in the same part.

    Rows of a single model are parted one by one.
    """
    keys: list[tuple[str, str]] = [(row.suite, row.run.model.name) for row in rows]
    if len(set(keys)) == 1:
        keys = [("", f"{index:09}") for index in range(len(rows))]
    groups = sorted(set(keys))
    part = {group: index % FOLDS for index, group in enumerate(groups)}
    found: list[list[int]] = [[] for _ in range(min(FOLDS, len(groups)))]
    for index, key in enumerate(keys):
        found[part[key]].append(index)
    return found


def cross_validated_errors(rows: Sequence[Measured]) -> Floats:
    """log(predicted / measured) step time of each row, from a fit that never saw its model in its suite.

    A fit's own rows would flatter it: a plan is for a model that nobody measured.
    """
    errors = np.zeros(len(rows))
    for test in folds(rows):
        held = set(test)
        train = [row for index, row in enumerate(rows) if index not in held]
        errors[test] = log_errors([rows[index] for index in test], fit_rows(train or rows))
    return errors


# Quantile of Student's t at which a normal distribution has its standard deviation (0.8413), by degrees of freedom.
T_QUANTILE = {1: 1.837, 2: 1.321, 3: 1.197, 4: 1.142, 5: 1.111, 6: 1.091, 7: 1.077, 8: 1.067, 9: 1.059}


def _error_of_a_new_one(left_out: Sequence[float]) -> float:
    """Standard error of predicting one more (processor, framework) from the errors made on those left out in turn.

    Two processors that were predicted to 14% do not prove 14% for a third: the prediction interval of so small a sample
    is wider, by Student's t. With fewer than two nothing is known, and a factor of two is taken.
    """
    count = len(left_out)
    if count < 2:
        return math.log(2)
    spread = math.sqrt(sum(error * error for error in left_out) / count)
    return spread * T_QUANTILE.get(count - 1, 1.05) * math.sqrt(1 + 1 / count)


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))
