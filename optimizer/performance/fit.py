"""Least-squares fit of a calibration to measured runs, with errors for models, processors and frameworks left out.

docs/estimator.md, Calibration: a row's coefficient is its start times a pooled factor and factors of its processor,
framework, precision or pair, whose logarithms are drawn to 0. The loss is robust, because some published runs are of
slow code; suites weigh alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.stats import norm, t

from optimizer.contract.errors import InvalidInputError
from optimizer.performance.calibration import (
    KINDS,
    NEW_FRAMEWORK,
    POOLED,
    Calibration,
    Coefficients,
    Residual,
    attention_precision,
    model_kind,
    product_precision,
    residual_key,
)
from optimizer.performance.measured_runs import MeasuredRun, log_errors, stack_tables
from optimizer.performance.setups import Setup
from optimizer.performance.table import step_seconds
from optimizer.performance.types import Floats


@dataclass(frozen=True, slots=True)
class _Start:
    """Start, spreads (log units) of the pooled and a group's value, and the most."""

    value: float
    spread: float
    group: float
    most: float = math.inf


# Measured one by one on H200 (h200_ops_202611.md): products at 0.74 of peak warm and 0.79 cold, their bytes at 0.4 to
# 1.1 of those counted, a kernel's start 1.1 us (CUDA graph) to 3.3 us; a layer's host time 1.0 ms (BERT, GPT-2), 1.4 ms
# (Hugging Face's Llama) or 2.0 ms (torch.nn.TransformerEncoderLayer), on another H200 1.3 to 3.0, and 1 to 4 ms for the
# rest of a step (h200_hosts_202611.md). Spreads: docs/estimator.md.
START = {
    "matmul_efficiency": _Start(0.76, 0.05, 0.1, most=1.0),
    "matmul_traffic": _Start(0.7, 0.2, 0.05),
    "attention_efficiency": _Start(1.0, 0.15, 0.15),
    "elementwise_traffic": _Start(1.0, 0.1, 0.1),
    "precision_efficiency": _Start(1.0, 0.0, 0.3),
    "overhead": _Start(1.0, 0.5, 0.1),
    "kernel_s": _Start(2e-6, 0.3, 0.05),
    "host_s_per_layer": _Start(1.4e-3, 0.05, 0.5),
    "host_s_per_step": _Start(2e-3, 0.5, 0.3),
    "exposed_communication": _Start(0.5, 0.3, 0.1, most=1.0),
    "network_efficiency": _Start(1.0, 0.3, 0.15),
    # Only adapt.py moves these, by framework: no run of measured_runs.csv shows them.
    "network_call_s": _Start(0.0, 0.0, 0.0),
    "tensor_hop_s": _Start(0.0, 0.0, 0.0),
    "pipeline_hop_s": _Start(0.0, 0.0, 0.0),
}
# Error of the equations, log units: rows of one suite share it, so the starts keep their say.
NOISE = 0.1
HUBER = 0.2  # beyond this log error a row counts linearly, not squared

_COEFFICIENTS = tuple(field.name for field in fields(Coefficients))
_STEP = 1e-4  # of the numerical derivative, in log units
_ENOUGH = 1e-6  # relative improvement below which the fit ends


def robust(error: Floats) -> Floats:
    """Shrink log errors beyond HUBER so that their squares grow linearly (Huber's loss)."""
    size = np.abs(error)
    return np.where(size <= HUBER, error, np.sign(error) * np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0)))


def redescending(error: Floats) -> Floats:
    """Shrink log errors so that a run far beyond HUBER hardly pulls at all (Cauchy's loss)."""
    return np.asarray(np.sign(error) * HUBER * np.sqrt(np.log1p((error / HUBER) ** 2)))


def factors(setup: Setup) -> dict[str, list[tuple[str, str]]]:
    """List the factors of each coefficient as (field of Calibration, key), the most general first."""
    processor, framework = setup.hardware.gpu.die, setup.recipe.framework
    names = {name: [(name, POOLED), (name, framework)] for name in _COEFFICIENTS}
    for name in ("matmul_efficiency", "matmul_traffic", "attention_efficiency"):
        names[name] = [(name, POOLED), (name, processor)]
    if setup.model.layers:  # a CNN has no attention
        names["attention_efficiency"].append(("attention_efficiency", f"{processor} {framework}"))
    for name, key in (
        ("matmul_efficiency", product_precision(setup.recipe.precision, framework)),
        ("attention_efficiency", attention_precision(setup.recipe.precision)),
    ):
        if key not in ("fp16", "bf16", "16-bit attention"):
            names[name].append(("precision_efficiency", key))
    return names


class _Problem:
    def __init__(self, rows: Sequence[MeasuredRun]) -> None:
        products = [factors(row.setup) for row in rows]
        suites = [row.suite for row in rows]
        used = {factor for row in products for names in row.values() for factor in names}
        self.parameters = sorted(factor for factor in used if self._spread(*factor))
        self.spreads = np.array([self._spread(*factor) for factor in self.parameters])
        place = {factor: index for index, factor in enumerate(self.parameters)}
        # Rows x parameters, 0 or 1.
        self.products = {name: np.zeros((len(rows), len(self.parameters))) for name in _COEFFICIENTS}
        for name, matrix in self.products.items():
            for index, row in enumerate(products):
                matrix[index, [place[factor] for factor in row[name] if factor in place]] = 1.0
        self.measured = np.log([row.step_time_s for row in rows])
        count = {suite: suites.count(suite) for suite in set(suites)}
        self.weights = np.sqrt([len(rows) / len(count) / count[suite] for suite in suites]) / NOISE
        self.table = stack_tables(rows)

    @staticmethod
    def _spread(field: str, key: str) -> float:
        return START[field].spread if key == POOLED else START[field].group

    def fields(self, theta: Floats) -> dict[str, Any]:
        logs = dict(zip(self.parameters, theta, strict=True))
        values: dict[str, dict[str, float]] = {field: {} for field in START}
        for field, key in self.parameters:
            start = START[field]
            # Pairs of processor and framework include the processor's factor.
            parts = {POOLED, key, key.split()[0] if field == "attention_efficiency" else key}
            log = sum(logs.get((field, part), 0.0) for part in parts)
            values[field][key] = float(f"{min(start.value * math.exp(log), start.most):.4g}")
        return {field: numbers for field, numbers in values.items() if numbers or START[field].value}

    def residuals(self, theta: Floats) -> Floats:
        """Compute weighted log errors, then parameters over spreads; theta may have rows."""
        columns = {
            name: np.minimum(START[name].value * np.exp(theta @ matrix.T), START[name].most)
            for name, matrix in self.products.items()
        }
        error = np.log(sum(step_seconds(self.table, Coefficients(**columns)).values())) - self.measured
        return np.concatenate([self.weights * robust(error), theta / self.spreads], axis=-1)

    def jacobian(self, theta: Floats) -> Floats:
        return (self.residuals(theta + _STEP * np.eye(len(theta))) - self.residuals(theta)).T / _STEP


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
            "framework": [setup.recipe.framework for setup in setups],
        }
    )


def fit_rows(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration without residuals to the measured time of one step of each run."""
    problem = _Problem(rows)
    start = np.zeros(len(problem.parameters))
    solution = least_squares(problem.residuals, start, jac=problem.jacobian, method="lm", ftol=_ENOUGH)
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    values = problem.fields(solution.x)
    return Calibration(**values, residuals=nothing, rows=len(rows), source="", as_of=date.min, command="")


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
