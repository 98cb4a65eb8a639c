"""Adapt a calibration to user runs: the shipped coefficients are the prior (docs/models.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy.optimize import least_squares

from optimizer.performance.calibration import (
    BY_PROCESSOR,
    FUSED,
    KINDS,
    MIXTURE,
    OF_MANY_NODES,
    POOLED,
    Calibration,
    Residual,
)
from optimizer.performance.fit import START, factors, left_out_errors, redescending, robust, tabulate_rows
from optimizer.performance.frameworks import frameworks
from optimizer.performance.measured_runs import MeasuredRun, log_errors, stack_tables
from optimizer.performance.table import stack, step_seconds
from optimizer.performance.types import Floats

# Error of a user's row and spread of known groups, log units: of 0.1 and 0.2, and of 0.25, 0.5 and 1, the least harm to
# known rows and most good to new suites (tests/benchmarks/accuracy.py, 2026-11-21).
ROW_ERROR = 0.2
KNOWN_SPREAD = 0.5
# Rows that the shipped error of a GPU weighs as.
PRIOR_ROWS = 2

# Start and spread (log units) of what only many nodes show: small and loose, so that rows prove it.
MANY_NODES_START_S = 20e-6
MANY_NODES_SPREAD = 2.5
# Fewest rows that show a 95th percentile: of 20 runs one is above the other 19.
ROWS_OF_A_TAIL = 19

_NORMAL_P95 = 1.645
_NEAR = 1e-4
_ENOUGH = 1e-6  # relative improvement below which the fit ends

Key = tuple[str, str]  # field of Calibration, and the key in it


def adapt(rows: Sequence[MeasuredRun], base: Calibration, only: Collection[str] = ()) -> Calibration:
    """Move the coefficients of ``base`` (``only`` some fields) that ``rows`` use; residuals stay the base's."""
    keys = sorted({key for row in rows for key in _own_factors(row, base) if not only or key[0] in only})
    spreads = {key: _spread(base, rows, *key) for key in keys}
    spreads = {key: spread for key, spread in spreads.items() if spread > 0}
    if not spreads:
        return base
    table = stack_tables(rows)
    measured = np.log([row.step_time_s for row in rows])

    def move(theta: Floats, digits: int) -> Calibration:
        update: dict[str, dict[str, float]] = {}
        for (field, key), log in zip(spreads, theta, strict=True):
            value = min(_value(base, field, key) * math.exp(log), START[field].most)
            update.setdefault(field, dict(getattr(base, field)))[key] = float(f"{value:.{digits}g}")
        return base.model_copy(update=update)

    def residuals(theta: Floats, loss: Callable[[Floats], Floats]) -> Floats:
        moved = move(theta, digits=17)
        coefficients = stack([row.setup.coefficients(moved) for row in rows])
        error = np.log(sum(step_seconds(table, coefficients).values())) - measured
        return np.concatenate([loss(error) / ROW_ERROR, theta / np.array(list(spreads.values()))])

    # The loss that leaves out runs far off has many minima: the other one finds the neighbourhood.
    near = least_squares(residuals, np.zeros(len(spreads)), method="lm", ftol=_NEAR, kwargs={"loss": robust})
    solution = least_squares(residuals, near.x, method="lm", ftol=_ENOUGH, kwargs={"loss": redescending})
    return move(solution.x, digits=6)


def add_framework(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """Add code whose runs move no number of another's to ``base``, with its own residual."""
    left_out = left_out_errors(rows, lambda train: adapt(train, base))
    return adapt(rows, base).model_copy(update={"residuals": residuals(rows, left_out, base)})


def add_processors(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """Add GPUs that ``base`` does not know, from runs of code that it knows; their mixtures judge its equations."""
    known = base.matmul_efficiency
    dense = [row for row in rows if not row.setup.model.experts and row.setup.hardware.gpu.die not in known]
    mixtures = [row for row in rows if row.setup.model.experts]
    fitted = adapt(dense, base, BY_PROCESSOR)
    left_out = left_out_errors(dense, lambda train: adapt(train, base, BY_PROCESSOR))
    updated = residuals(dense, left_out, base)
    judged = base.model_copy(update={"residuals": {POOLED: base.residuals[POOLED]}})
    updated[MIXTURE + FUSED] = residuals(mixtures, log_errors(mixtures, fitted), judged)[MIXTURE]
    return fitted.model_copy(update={"residuals": updated})


def residuals(rows: Sequence[MeasuredRun], left_out: Floats, base: Calibration) -> dict[str, Residual]:
    """Bring ``base``'s residuals of the rows' GPUs up to date.

    Root mean square of the left-out errors and of ``base``'s, or what the 95th percentile of all rows or of one model
    asks for if more: an unseen model may be like the worst. Rows of one model do not go below the smallest error of the
    base: they do not show how others fare.
    """
    updated = dict(base.residuals)
    least = min(residual.relative_error for name, residual in base.residuals.items() if residual.rows or name == POOLED)
    table = tabulate_rows(rows).assign(square=left_out**2, left_out=left_out)
    groups = [(str(key), own) for key, own in table.groupby("key")]
    groups += [(kind, table[table.kind == kind]) for kind in KINDS]
    for key, own in groups:
        if own.empty:
            continue
        before = base.residuals.get(key) or Residual(rows=0, relative_error=base.residuals[POOLED].relative_error)
        squares = float(own.square.sum()) + PRIOR_ROWS * before.relative_error**2
        error = math.sqrt(squares / (len(own) + PRIOR_ROWS))
        tails = [-of_one.left_out for _, of_one in own.groupby("model")] + [-own.left_out]
        tails = [slower for slower in tails if len(slower) >= ROWS_OF_A_TAIL]
        # Weibull's rank, 0.95 (n + 1): of n rows it has one run in 20 above it on average.
        error = max([error, *(float(np.quantile(tail, 0.95, method="weibull")) / _NORMAL_P95 for tail in tails)])
        if own.model.nunique() == 1:
            error = max(error, min(least, before.relative_error))
        updated[key] = Residual(rows=before.rows + len(own), relative_error=round(error, 4))
    return updated


def _own_factors(row: MeasuredRun, base: Calibration) -> set[Key]:
    """List the most special key of each field in the row's products.

    Not its processor where ``base`` knows that but not the code: how slow the code is says nothing of the processor.
    What only many nodes show is for rows on several nodes whose code is new, or has shown it.
    """
    framework = row.setup.recipe.framework
    known = framework in base.overhead or frameworks()[framework].fitted_as in base.overhead
    one_node = np.asarray(row.setup.grid.nodes) <= 1
    own: set[Key] = set()
    for names in factors(row.setup).values():
        special = {field: key for field, key in names if key != POOLED}
        for field, key in special.items():
            of_processor = field in BY_PROCESSOR and key == row.setup.hardware.gpu.die
            others = not known and of_processor and key in getattr(base, field)
            hidden = field in OF_MANY_NODES and (one_node or (known and key not in getattr(base, field)))
            if not others and not hidden:
                own.add((field, key))
    return own


def _value(base: Calibration, field: str, key: str) -> float:
    """Value of the key: its own, else that of the code with the same kernels, its processor's, or the pooled one."""
    values: dict[str, float] = getattr(base, field)
    *processor, framework = key.split(" ")
    profile = frameworks().get(framework)
    same_kernels = " ".join([*processor, profile.fitted_as]) if profile and profile.fitted_as else key
    value = next((values[name] for name in (key, same_kernels, key.split()[0], POOLED) if name in values), 1.0)
    return value or MANY_NODES_START_S


def _spread(base: Calibration, rows: Sequence[MeasuredRun], field: str, key: str) -> float:
    """Distance that the coefficient may move, log units."""
    if field in OF_MANY_NODES:
        return MANY_NODES_SPREAD * (KNOWN_SPREAD if key in getattr(base, field) else 1.0)
    if key in getattr(base, field):
        return START[field].group * KNOWN_SPREAD
    spread = START[field].group
    if field == "matmul_efficiency":
        # The fit's spread covers only processors of data centres.
        gpus = [row.setup.hardware.gpu for row in rows if (field, key) in _own_factors(row, base)]
        spread = max([spread, *(base.residual(gpu).relative_error for gpu in gpus)])
    return spread
