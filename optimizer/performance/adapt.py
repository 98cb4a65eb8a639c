"""Adapt a calibration to a user's own runs: move the shipped one as far as those runs prove.

Thrown together with the shipped rows, a user's few would be outvoted by hundreds from other machines, or, weighted as a
suite of their own, be fitted to the last digit. So the shipped calibration is the prior: each coefficient that the
user's rows use may leave its shipped value at a cost that grows with the distance over its spread, and each row pulls
as much as it proves (``fit``'s spreads and robust loss). What that buys, on suites the shipped rows do not hold:
docs/calibration.md, measured by tests/benchmarks/accuracy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from optimizer.performance.calibrate import folds
from optimizer.performance.calibration import KINDS, POOLED, Calibration, Residual, model_kind, residual_key
from optimizer.performance.fit import HUBER, START, factors
from optimizer.performance.measured_runs import MeasuredRun, log_errors
from optimizer.performance.types import Floats

# Error of a user's row, in log units: rows of one set-up share most of theirs, so each proves less than a shipped row.
# Machines with the same GPU and framework differ less than GPUs and frameworks do: half their spread. Of 0.1 and 0.2,
# and of 0.25, 0.5 and 1, these did least harm to rows the calibration knew already and most good to suites it did not
# (the shipped rows, as tests/benchmarks/accuracy.py measures it, 2026-11-21).
ROW_ERROR = 0.2
KNOWN_SPREAD = 0.5
# The error that the shipped calibration gives a GPU counts as two rows' beside the errors of the user's own.
PRIOR_ROWS = 2

_STEP = 1e-3  # of the numerical derivative, in log units
_LONGEST = 0.5  # step of one iteration, in log units
_ITERATIONS = 20
_ENOUGH = 1e-4  # of a step, in log units

Key = tuple[str, str]  # field of Calibration, and the key in it
Fitter = Callable[[Sequence[MeasuredRun]], Calibration]


def adapt(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """``base`` with the coefficients that ``rows`` use moved towards them; residuals and provenance stay the base's."""
    spread_of = {key: _spread(base, rows, *key) for key in sorted({key for row in rows for key in _own(row)})}
    keys = [key for key, spread in spread_of.items() if spread > 0]
    values = {key: _value(base, *key) for key in keys}
    spreads = np.array([spread_of[key] for key in keys])

    def moved(theta: Floats) -> Calibration:
        update: dict[str, dict[str, float]] = {}
        for (field, key), log in zip(keys, theta, strict=True):
            value = min(values[field, key] * math.exp(log), START[field].most)
            update.setdefault(field, dict(getattr(base, field)))[key] = float(f"{value:.6g}")
        return base.model_copy(update=update)

    theta = np.zeros(len(keys))
    for _ in range(_ITERATIONS if keys else 0):
        error = log_errors(rows, moved(theta))
        nudged = [(log_errors(rows, moved(theta + _STEP * unit)) - error) / _STEP for unit in np.eye(len(keys))]
        jacobian = np.stack(nudged, axis=1)
        # Gauss-Newton with Huber's weights: a row that is far off pulls as if it were HUBER off.
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(error), HUBER)) / ROW_ERROR**2
        curvature = (jacobian * weights[:, None]).T @ jacobian + np.diag(1 / spreads**2)
        gradient = jacobian.T @ (weights * error) + theta / spreads**2
        step = np.clip(np.linalg.solve(curvature, gradient), -_LONGEST, _LONGEST)
        theta = theta - step
        if np.abs(step).max() < _ENOUGH:
            break
    return moved(theta)


def left_out_errors(rows: Sequence[MeasuredRun], fitter: Fitter) -> Floats:
    """log(predicted / measured) step time of each row, from ``fitter`` given the rows of the other models only.

    With one model, given the other rows; a single row is predicted by ``fitter`` of none.
    """
    errors = np.zeros(len(rows))
    for test in folds(rows):
        held = set(test)
        train = [row for index, row in enumerate(rows) if index not in held]
        errors[test] = log_errors([rows[index] for index in test], fitter(train))
    return errors


def residuals(rows: Sequence[MeasuredRun], left_out: Floats, base: Calibration) -> dict[str, Residual]:
    """``base``'s residuals with those of the rows' GPUs brought up to date.

    The error is the root mean square of the rows' own, left out of the fit, and of the error the base gives the GPU
    (as PRIOR_ROWS rows). Rows of a single model never show how other models fare, so with one model it does not go
    below the smallest error of the base.
    """
    found = dict(base.residuals)
    floor = min(residual.relative_error for name, residual in base.residuals.items() if residual.rows or name == POOLED)
    keys = [
        residual_key(row.setup.hardware.gpu, row.setup.recipe.precision, row.setup.recipe.framework) for row in rows
    ]
    groups = {key: [index for index, name in enumerate(keys) if name == key] for key in sorted(set(keys))}
    for kind in KINDS:
        groups[kind] = [index for index, row in enumerate(rows) if model_kind(row.setup.model) == kind]
    for key, mine in groups.items():
        if not mine:
            continue
        before = base.residuals.get(key) or Residual(rows=0, relative_error=base.residuals[POOLED].relative_error)
        squares = float(np.sum(left_out[mine] ** 2)) + PRIOR_ROWS * before.relative_error**2
        error = math.sqrt(squares / (len(mine) + PRIOR_ROWS))
        if len({rows[index].setup.model.name for index in mine}) == 1:
            error = max(error, min(floor, before.relative_error))
        found[key] = Residual(rows=before.rows + len(mine), relative_error=round(error, 4))
    return found


def _own(row: MeasuredRun) -> set[Key]:
    """The coefficients that are the row's own: of each of its products, the most special key of each field."""
    found = set()
    for names in factors(row.setup).values():
        found |= set({field: key for field, key in names if key != POOLED}.items())
    return found


def _value(base: Calibration, field: str, key: str) -> float:
    """What ``base`` takes for the key: its value, else its processor's or framework's, else the pooled one."""
    values: dict[str, float] = getattr(base, field)
    return values.get(key, values.get(key.split()[0], values.get(POOLED, 1.0)))


def _spread(base: Calibration, rows: Sequence[MeasuredRun], field: str, key: str) -> float:
    """How far the coefficient may move, in log units."""
    if key in getattr(base, field):
        return START[field].group * KNOWN_SPREAD
    spread = START[field].group
    if field == "matmul_efficiency":
        # The fit's spread is for processors of data centres; the calibration's own error says how far others may be.
        gpus = [row.setup.hardware.gpu for row in rows if (field, key) in _own(row)]
        spread = max([spread, *(base.residual(gpu).relative_error for gpu in gpus)])
    return spread
