"""Least-squares fit of the coefficients (docs/estimator.md, Calibration).

A row's coefficient is its start times a pooled factor and factors of its processor, framework, precision or pair, whose
logarithms are drawn to 0. The loss is robust, because some published runs are of slow code; suites weigh alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from optimizer.performance.calibration import POOLED, Coefficients, attention_precision, product_precision
from optimizer.performance.frameworks import framework_name
from optimizer.performance.measured_runs import MeasuredRun, stack_tables
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


def fit_coefficients(rows: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Fit the fields of Calibration to the measured time of one step of each run."""
    problem = _Problem(rows)
    start = np.zeros(len(problem.parameters))
    solution = least_squares(problem.residuals, start, jac=problem.jacobian, method="lm", ftol=_ENOUGH)
    return problem.fields(solution.x)


def robust(error: Floats) -> Floats:
    """Shrink log errors beyond HUBER so that their squares grow linearly (Huber's loss)."""
    size = np.abs(error)
    return np.where(size <= HUBER, error, np.sign(error) * np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0)))


def redescending(error: Floats) -> Floats:
    """Shrink log errors so that a run far beyond HUBER hardly pulls at all (Cauchy's loss)."""
    return np.asarray(np.sign(error) * HUBER * np.sqrt(np.log1p((error / HUBER) ** 2)))


def factors(setup: Setup) -> dict[str, list[tuple[str, str]]]:
    """List the factors of each coefficient as (field of Calibration, key), the most general first."""
    processor, framework = setup.hardware.gpu.die, framework_name(setup.recipe.framework)
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
