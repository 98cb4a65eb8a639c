"""Fit a calibration to measured runs, with the error of its predictions for runs, GPUs and frameworks left out.

fit.py has the least-squares fit; adapt.py moves a fitted calibration instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date

import numpy as np

from optimizer.errors import InvalidInputError
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
from optimizer.performance.fit import fit_coefficients
from optimizer.performance.frameworks import framework_name
from optimizer.performance.measured_runs import MeasuredRun, log_errors
from optimizer.performance.types import Floats

# Least error of a GPU that nobody measured: two kinds of data-centre GPU that predict each other well say little of a
# 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# A few rows that happen to be met well do not prove a small error: a GPU's error is drawn to that of all rows as if so
# many more had been measured on it.
DRAWN_ROWS = 20
# Parts of a cross-validation.
FOLDS = 8

# Quantile of Student's t at which a normal distribution has its standard deviation (0.8413), by degrees of freedom.
T_QUANTILE = {1: 1.837, 2: 1.321, 3: 1.197, 4: 1.142, 5: 1.111, 6: 1.091, 7: 1.077, 8: 1.067, 9: 1.059}


def fit(rows: Sequence[MeasuredRun], *, source: str, as_of: date, command: str) -> Calibration:
    """Fit a calibration to ``rows``, with residuals by GPU and, for other GPUs, from leaving one processor out.

    Raises:
        InvalidInputError: there are no rows.
    """
    if not rows:
        raise InvalidInputError("no measured runs", limit="at least one")
    fitted = fit_rows(rows)
    errors = cross_validated_errors(rows)
    setups = [row.setup for row in rows]
    keys = [residual_key(setup.hardware.gpu, setup.recipe.precision, setup.recipe.framework) for setup in setups]
    residuals = {}
    for key in sorted(set(keys)):
        own_errors = errors[[index for index, own_key in enumerate(keys) if own_key == key]]
        drawn = math.sqrt((np.sum(own_errors**2) + DRAWN_ROWS * _rms(errors) ** 2) / (len(own_errors) + DRAWN_ROWS))
        residuals[key] = Residual(rows=len(own_errors), relative_error=round(drawn, 4))
    processors = [die(setup.hardware.gpu) for setup in setups]
    frameworks = [framework_name(setup.recipe.framework) for setup in setups]
    new_gpu = _error_of_one_more(_left_out_errors(rows, processors, frameworks, new_gpus=True))
    new_framework = _error_of_one_more(_left_out_errors(rows, frameworks, processors, new_gpus=False))
    residuals[POOLED] = Residual(rows=0, relative_error=round(max(new_gpu, LEAST_ERROR_OF_A_NEW_GPU), 4))
    residuals[NEW_FRAMEWORK] = Residual(rows=0, relative_error=round(new_framework, 4))
    for kind in KINDS:
        own = [float(error) for setup, error in zip(setups, errors, strict=True) if model_kind(setup.model) == kind]
        residuals[kind] = Residual(rows=len(own), relative_error=round(_error_of_one_more(own), 4))
    update = {"residuals": residuals, "source": source, "as_of": as_of, "command": command}
    return fitted.model_copy(update=update)


def fit_rows(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration to ``rows`` to predict others with; it has no residuals."""
    values = fit_coefficients(
        [row.setup for row in rows], [row.step_time_s for row in rows], [row.suite for row in rows]
    )
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    return Calibration(**values, residuals=nothing, rows=len(rows), source="", as_of=date.min, command="")


def folds(rows: Sequence[MeasuredRun]) -> list[list[int]]:
    """Part the rows' positions into at most FOLDS parts, all rows of one model of one suite in the same part.

    Rows of a single model are parted one by one.
    """
    keys: list[tuple[str, str]] = [(row.suite, row.setup.model.name) for row in rows]
    if len(set(keys)) == 1:
        keys = [("", f"{index:09}") for index in range(len(rows))]
    groups = sorted(set(keys))
    part = {group: index % FOLDS for index, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(min(FOLDS, len(groups)))]
    for index, key in enumerate(keys):
        parts[part[key]].append(index)
    return parts


def cross_validated_errors(rows: Sequence[MeasuredRun]) -> Floats:
    """Compute log(predicted / measured) step time of each row from a fit that never saw its model in its suite.

    A fit's own rows would flatter it: a plan is for a model that nobody measured.
    """
    errors = np.zeros(len(rows))
    for test in folds(rows):
        held = set(test)
        train = [row for index, row in enumerate(rows) if index not in held]
        errors[test] = log_errors([rows[index] for index in test], fit_rows(train or rows))
    return errors


def _left_out_errors(
    rows: Sequence[MeasuredRun], own: Sequence[str], other: Sequence[str], *, new_gpus: bool
) -> list[float]:
    """Error of predicting each kind of ``own`` (the rows' processors, say) from a fit to the rest.

    To judge one new kind alone, only rows count whose ``other`` kind (framework, say) the rest knows. With
    ``new_gpus`` the power limit of the processor left out is unknown too.
    """
    errors = []
    for kind in sorted(set(own)):
        known = {name for name, row_kind in zip(other, own, strict=True) if row_kind != kind}
        rest = [row for row, row_kind in zip(rows, own, strict=True) if row_kind != kind]
        left = [row for row, row_kind, name in zip(rows, own, other, strict=True) if row_kind == kind and name in known]
        if left and rest:
            errors.append(_rms(log_errors(left, fit_rows(rest), new_gpus=new_gpus)))
    return errors


def _error_of_one_more(left_out: Sequence[float]) -> float:
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
