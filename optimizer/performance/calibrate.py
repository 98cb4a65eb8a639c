"""Fit a calibration to measured runs, with errors for models, processors and frameworks left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import date

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from optimizer.contract.errors import InvalidInputError
from optimizer.performance.calibration import (
    KINDS,
    NEW_FRAMEWORK,
    POOLED,
    Calibration,
    Residual,
    model_kind,
    residual_key,
)
from optimizer.performance.fit import fit_coefficients
from optimizer.performance.frameworks import framework_name
from optimizer.performance.measured_runs import MeasuredRun, log_errors
from optimizer.performance.types import Floats

# Two kinds of data-centre GPU that predict each other say little of a 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# Rows of the common error that a GPU's own is drawn to.
DRAWN_ROWS = 20
# Parts of a cross-validation.
FOLDS = 8


Fitter = Callable[[Sequence[MeasuredRun]], Calibration]


def fit(rows: Sequence[MeasuredRun], *, source: str, as_of: date, command: str) -> Calibration:
    """Fit a calibration to ``rows``, with residuals by GPU and for left-out processors, frameworks and kinds."""
    if not rows:
        raise InvalidInputError("no measured runs", limit="at least one")
    fitted = fit_rows(rows)
    errors = left_out_errors(rows, lambda train: fit_rows(train or rows))
    table = tabulate_rows(rows).assign(error=errors)
    residuals = {}
    for key, own in table.groupby("key").error:
        drawn = math.sqrt(((own**2).sum() + DRAWN_ROWS * _rms(errors) ** 2) / (len(own) + DRAWN_ROWS))
        residuals[str(key)] = Residual(rows=len(own), relative_error=round(drawn, 4))
    new_gpu = _error_of_one_more(_left_out_kind_errors(table, "processor", "framework"))
    new_framework = _error_of_one_more(_left_out_kind_errors(table, "framework", "processor"))
    residuals[POOLED] = Residual(rows=0, relative_error=round(max(new_gpu, LEAST_ERROR_OF_A_NEW_GPU), 4))
    residuals[NEW_FRAMEWORK] = Residual(rows=0, relative_error=round(new_framework, 4))
    for kind in KINDS:
        kind_errors = table.error[table.kind == kind].tolist()
        residuals[kind] = Residual(rows=len(kind_errors), relative_error=round(_error_of_one_more(kind_errors), 4))
    update = {"residuals": residuals, "source": source, "as_of": as_of, "command": command}
    return fitted.model_copy(update=update)


def tabulate_rows(rows: Sequence[MeasuredRun]) -> pd.DataFrame:
    """Tabulate the rows with their residual key, kind, model, processor and framework."""
    setups = [row.setup for row in rows]
    return pd.DataFrame(
        {
            "row": rows,
            "key": [
                residual_key(s.hardware.gpu, s.recipe.precision, s.recipe.framework, pipelines=s.pipelines)
                for s in setups
            ],
            "kind": [model_kind(setup.model) for setup in setups],
            "model": [setup.model.name for setup in setups],
            "processor": [setup.hardware.gpu.die for setup in setups],
            "framework": [framework_name(setup.recipe.framework) for setup in setups],
        }
    )


def fit_rows(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration without residuals."""
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    return Calibration(
        **fit_coefficients(rows), residuals=nothing, rows=len(rows), source="", as_of=date.min, command=""
    )


def folds(rows: Sequence[MeasuredRun]) -> list[list[int]]:
    """Part positions into at most FOLDS parts: rows of one suite's model together, or one by one."""
    keys: list[tuple[str, str]] = [(row.suite, row.setup.model.name) for row in rows]
    if len(set(keys)) == 1:
        keys = [("", f"{index:09}") for index in range(len(rows))]
    groups = sorted(set(keys))
    part = {group: index % FOLDS for index, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(min(FOLDS, len(groups)))]
    for index, key in enumerate(keys):
        parts[part[key]].append(index)
    return parts


def left_out_errors(rows: Sequence[MeasuredRun], fitter: Fitter) -> Floats:
    """Compute log(predicted / measured) step time of each row from rows of other models.

    With one model, from the other rows; a single row is predicted by ``fitter`` of none.
    """
    errors = np.zeros(len(rows))
    for test in folds(rows):
        held = set(test)
        train = [row for index, row in enumerate(rows) if index not in held]
        errors[test] = log_errors([rows[index] for index in test], fitter(train))
    return errors


def _left_out_kind_errors(table: pd.DataFrame, column: str, other: str) -> list[float]:
    """Errors of predicting each value of ``column`` from a fit to the rest, where it knows ``other``."""
    errors = []
    for value, left in table.groupby(column):
        rest = table[table[column] != value]
        left = left[left[other].isin(rest[other])]
        if len(left) and len(rest):
            fitted = fit_rows(rest.row.tolist())
            errors.append(_rms(log_errors(left.row.tolist(), fitted, new_gpus=column == "processor")))
    return errors


def _error_of_one_more(left_out: Sequence[float]) -> float:
    """Prediction error of one more processor or framework; log 2 with fewer than two left out."""
    count = len(left_out)
    if count < 2:
        return math.log(2)
    spread = math.sqrt(sum(error * error for error in left_out) / count)
    # Student's t at the quantile of a normal's standard deviation (0.8413).
    return spread * float(t.ppf(norm.cdf(1), count - 1)) * math.sqrt(1 + 1 / count)


def _rms(errors: Floats) -> float:
    return float(np.sqrt(np.mean(errors**2)))
