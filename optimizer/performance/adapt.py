"""Adapt a calibration to user runs: the shipped coefficients are the prior (docs/calibration.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from optimizer.performance.calibrate import tabulate_rows
from optimizer.performance.calibration import KINDS, POOLED, Calibration, Residual
from optimizer.performance.evaluate import step_s
from optimizer.performance.fit import START, factors, robust
from optimizer.performance.frameworks import frameworks
from optimizer.performance.inputs import stack, stack_coefficients
from optimizer.performance.measured_runs import MeasuredRun
from optimizer.performance.types import Floats

# Error of a user's row and spread of known groups, log units: of 0.1 and 0.2, and of 0.25, 0.5 and 1, the least harm to
# known rows and most good to new suites (tests/benchmarks/accuracy.py, 2026-11-21).
ROW_ERROR = 0.2
KNOWN_SPREAD = 0.5
# Rows that the shipped error of a GPU weighs as.
PRIOR_ROWS = 2

_ENOUGH = 1e-8  # relative improvement below which the fit ends

Key = tuple[str, str]  # field of Calibration, and the key in it


def adapt(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """Move the coefficients of ``base`` that ``rows`` use towards them; residuals stay the base's."""
    spreads = {key: _spread(base, rows, *key) for key in sorted({key for row in rows for key in _own_factors(row)})}
    spreads = {key: spread for key, spread in spreads.items() if spread > 0}
    if not spreads:
        return base
    inputs = stack([row.setup.inputs(None) for row in rows])
    measured = np.log([row.step_time_s for row in rows])

    def move(theta: Floats, digits: int) -> Calibration:
        update: dict[str, dict[str, float]] = {}
        for (field, key), log in zip(spreads, theta, strict=True):
            value = min(_value(base, field, key) * math.exp(log), START[field].most)
            update.setdefault(field, dict(getattr(base, field)))[key] = float(f"{value:.{digits}g}")
        return base.model_copy(update=update)

    def residuals(theta: Floats) -> Floats:
        moved = move(theta, digits=17)
        coefficients = [moved.coefficients(row.setup.hardware.gpu, row.setup.recipe) for row in rows]
        error = np.log(step_s(replace(inputs, coefficients=stack_coefficients(coefficients)))) - measured
        return np.concatenate([robust(error) / ROW_ERROR, theta / np.array(list(spreads.values()))])

    solution = least_squares(residuals, np.zeros(len(spreads)), method="lm", ftol=_ENOUGH)
    return move(solution.x, digits=6)


def residuals(rows: Sequence[MeasuredRun], left_out: Floats, base: Calibration) -> dict[str, Residual]:
    """Bring ``base``'s residuals of the rows' GPUs up to date.

    Root mean square of the left-out errors and of ``base``'s. Rows of one model do not go below the smallest error of
    the base: they do not show how others fare.
    """
    updated = dict(base.residuals)
    least = min(residual.relative_error for name, residual in base.residuals.items() if residual.rows or name == POOLED)
    table = tabulate_rows(rows).assign(square=left_out**2)
    groups = [(str(key), own) for key, own in table.groupby("key")]
    groups += [(kind, table[table.kind == kind]) for kind in KINDS]
    for key, own in groups:
        if own.empty:
            continue
        before = base.residuals.get(key) or Residual(rows=0, relative_error=base.residuals[POOLED].relative_error)
        squares = float(own.square.sum()) + PRIOR_ROWS * before.relative_error**2
        error = math.sqrt(squares / (len(own) + PRIOR_ROWS))
        if own.model.nunique() == 1:
            error = max(error, min(least, before.relative_error))
        updated[key] = Residual(rows=before.rows + len(own), relative_error=round(error, 4))
    return updated


def _own_factors(row: MeasuredRun) -> set[Key]:
    """List the most special key of each field in the row's products."""
    own: set[Key] = set()
    for names in factors(row.setup).values():
        own |= set({field: key for field, key in names if key != POOLED}.items())
    return own


def _value(base: Calibration, field: str, key: str) -> float:
    """Value of the key: its own, else that of the code with the same kernels, its processor's, or the pooled one."""
    values: dict[str, float] = getattr(base, field)
    *processor, framework = key.split(" ")
    profile = frameworks().get(framework)
    same_kernels = " ".join([*processor, profile.fitted_as]) if profile and profile.fitted_as else key
    return next((values[name] for name in (key, same_kernels, key.split()[0], POOLED) if name in values), 1.0)


def _spread(base: Calibration, rows: Sequence[MeasuredRun], field: str, key: str) -> float:
    """Distance that the coefficient may move, log units."""
    if key in getattr(base, field):
        return START[field].group * KNOWN_SPREAD
    spread = START[field].group
    if field == "matmul_efficiency":
        # The fit's spread covers only processors of data centres.
        gpus = [row.setup.hardware.gpu for row in rows if (field, key) in _own_factors(row)]
        spread = max([spread, *(base.residual(gpu).relative_error for gpu in gpus)])
    return spread
