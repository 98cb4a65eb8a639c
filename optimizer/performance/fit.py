"""Least-squares fit of the speed model's numbers to measured runs, from nothing or from a calibration.

docs/estimator.md, Calibration: a row's coefficient is its start times factors whose logarithms are drawn to 0. A fit
from nothing (START) has a factor of all rows and factors of their processor, framework, precision or pair; a fit from a
calibration has only the most special of these. The loss is robust, because some runs are of slow code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import numpy as np
from scipy.optimize import least_squares

from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.calibration import (
    BY_PROCESSOR,
    OF_MANY_NODES,
    POOLED,
    Calibration,
    Coefficients,
    Key,
    Residual,
    factors,
)
from optimizer.performance.case import Case
from optimizer.performance.confidence import cell_of, kind_of, speed_source
from optimizer.performance.frameworks import frameworks
from optimizer.performance.measured_runs import MeasuredRun, Refused, log_errors, throughput_error
from optimizer.performance.table import stack, step_seconds
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
    "attention_efficiency": _Start(1.0, 0.15, 0.15),
    "elementwise_traffic": _Start(1.0, 0.1, 0.1),
    "precision_efficiency": _Start(1.0, 0.0, 0.3),
    "overhead": _Start(1.0, 0.5, 0.1),
    "host_s_per_layer": _Start(1.4e-3, 0.05, 0.5),
    "network_efficiency": _Start(1.0, 0.3, 0.15),
    # No run of measured_runs.csv shows the last ones: only ``adapt`` moves them, by framework.
    "network_call_s": _Start(0.0, 0.0, 0.0),
    "tensor_hop_s": _Start(0.0, 0.0, 0.0),
    "pipeline_hop_s": _Start(0.0, 0.0, 0.0),
}
HUBER = 0.2  # beyond this log error a row counts linearly, not squared

# Error of a user's row and spread of known groups, log units: of 0.1 and 0.2, and of 0.25, 0.5 and 1, the least harm to
# known rows and most good to new suites (tests/benchmarks/accuracy.py, 2026-11-21).
ROW_ERROR = 0.2
KNOWN_SPREAD = 0.5
# Least error that is stated, of runs that are all faster than predicted.
LEAST_ERROR = 0.02
# Start and spread (log units) of what only many nodes show: small and loose, so that rows prove it.
MANY_NODES_START_S = 20e-6
MANY_NODES_SPREAD = 2.5
# Fewest rows that show a 95th percentile: of 20 runs one is above the other 19.
ROWS_OF_A_TAIL = 19
_NORMAL_P95 = 1.645
# Most parts of a cross-validation.
FOLDS = 8

_COEFFICIENTS = tuple(field.name for field in fields(Coefficients))
_STEP = 1e-4  # of the numerical derivative, in log units

Fitter = Callable[[Sequence[MeasuredRun]], Calibration]


def factors_of(setup: Case) -> dict[str, list[Key]]:
    """List the factors of each coefficient of a run, in each field the most general first."""
    processor, framework = setup.hardware.gpu.die, setup.recipe.framework
    names = factors(processor, framework, setup.recipe)
    if not setup.model.layers:  # a CNN has no attention
        names["attention_efficiency"].remove(("attention_efficiency", f"{processor} {framework}"))
    return names


def adapt(rows: Sequence[MeasuredRun], base: Calibration, only: Collection[str] = ()) -> Calibration:
    """Move the coefficients of ``base`` (``only`` some fields) that ``rows`` use; residuals stay the base's."""
    own = [_own_factors(row, base, only) for row in rows]
    spreads = {key: _spread(base, *key) for names in own for keys in names.values() for key in keys}
    return solve(rows, base, own, spreads, np.full(len(rows), 1 / ROW_ERROR))


def solve(
    rows: Sequence[MeasuredRun],
    base: Calibration,
    factors_of_rows: Sequence[Mapping[str, Sequence[Key]]],
    spreads: Mapping[Key, float],
    weights: Floats,
) -> Calibration:
    """Multiply numbers of ``base`` by the factors that predict ``rows`` best.

    Args:
        factors_of_rows: each row's factors by coefficient, the most general first.
        spreads: how far the logarithm of a factor may move; one of 0 stays.
    """
    parameters = sorted(key for key, spread in spreads.items() if spread > 0)
    if not parameters:
        return base
    widths = np.array([spreads[key] for key in parameters])
    place = {key: index for index, key in enumerate(parameters)}
    start: Coefficients = stack([row.setup.coefficients(base) for row in rows])
    columns = {}
    for name in _COEFFICIENTS:
        takes = np.zeros((len(rows), len(parameters)))  # rows x parameters, 0 or 1
        for index, names in enumerate(factors_of_rows):
            takes[index, [place[key] for key in names.get(name, ()) if key in place]] = 1.0
        first = np.asarray(getattr(start, name))
        columns[name] = np.where(takes.any(axis=1) & (first == 0), MANY_NODES_START_S, first), takes.T
    table, measured = stack([row.table for row in rows]), np.log([row.step_time_s for row in rows])

    def residuals(theta: Floats) -> Floats:
        """Compute weighted log errors, then parameters over spreads; theta may have rows."""
        moved = {
            name: np.minimum(first * np.exp(theta @ takes), START[name].most)
            for name, (first, takes) in columns.items()
        }
        error = np.log(sum(step_seconds(table, Coefficients(**moved)).values())) - measured
        # Huber's loss: the square of a shrunk error grows linearly beyond HUBER.
        size = np.abs(error)
        shrunk = np.sign(error) * np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0))
        return np.concatenate([weights * np.where(size <= HUBER, error, shrunk), theta / widths], axis=-1)

    def jacobian(theta: Floats) -> Floats:
        return (residuals(theta + _STEP * np.eye(len(theta))) - residuals(theta)).T / _STEP

    theta = least_squares(residuals, np.zeros(len(parameters)), jac=jacobian, method="lm", ftol=1e-6).x
    logs = dict(zip(parameters, theta.tolist(), strict=True))
    update: dict[str, dict[str, float]] = {}
    for row, names in zip(rows, factors_of_rows, strict=True):
        values = base.values(row.setup.hardware.gpu, row.setup.recipe)
        for name, keys in names.items():
            moved_by: dict[str, float] = {}  # special values include the more general factors of their field
            for field, key in keys:
                moved_by[field] = moved_by.get(field, 0.0) + logs.get((field, key), 0.0)
                if (field, key) in logs:
                    value = values[name].get(field, 1.0) or MANY_NODES_START_S
                    value = min(value * math.exp(moved_by[field]), START[field].most)
                    update.setdefault(field, dict(getattr(base, field)))[key] = float(f"{value:.6g}")
    return base.model_copy(update=update)


def _own_factors(row: MeasuredRun, base: Calibration, only: Collection[str]) -> dict[str, list[Key]]:
    """List the most special factor of each field.

    Not its processor where ``base`` knows that but not the code: how slow the code is says nothing of the processor.
    What only many nodes show is for rows on several nodes whose code is new, or has shown it.
    """
    framework = row.setup.recipe.framework
    known = framework in base.overhead or frameworks()[framework].fitted_as in base.overhead
    one_node = np.asarray(row.setup.grid.nodes) <= 1
    own: dict[str, list[Key]] = {}
    for name, names in factors_of(row.setup).items():
        special = {field: key for field, key in names if key != POOLED and (not only or field in only)}
        for field, key in special.items():
            of_processor = field in BY_PROCESSOR and key == row.setup.hardware.gpu.die
            others = not known and of_processor and key in getattr(base, field)
            hidden = field in OF_MANY_NODES and (one_node or (known and key not in getattr(base, field)))
            if not others and not hidden:
                own.setdefault(name, []).append((field, key))
    return own


def _spread(base: Calibration, field: str, key: str) -> float:
    """Distance that a coefficient may move, log units."""
    is_known = key in getattr(base, field)
    spread = MANY_NODES_SPREAD if field in OF_MANY_NODES else START[field].group
    if is_known:
        return spread * KNOWN_SPREAD
    if field == "matmul_efficiency":
        # The fit's spread covers only processors of data centres.
        spread = max(spread, base.residuals[POOLED].relative_error)
    return spread


def folds(rows: Sequence[MeasuredRun]) -> list[list[int]]:
    """Part positions into at most FOLDS parts: rows of one suite's model together, or one by one."""
    keys = [(row.suite, row.setup.model.name) for row in rows]
    if len(set(keys)) == 1:
        keys = [("", f"{index:09}") for index in range(len(rows))]
    part = {group: index % FOLDS for index, group in enumerate(sorted(set(keys)))}
    parts: list[list[int]] = [[] for _ in range(min(FOLDS, len(part)))]
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


def conformal(left_out: Sequence[tuple[str, float]]) -> float:
    """Standard deviation whose 95th percentile one more run stays within (split conformal, arXiv:2107.07511, 1).

    ``left_out`` has the log errors of runs with their groups, which weigh alike from ROWS_OF_A_TAIL runs on: an unseen
    suite or model may be like any of them. With fewer runs in all the slowest counts.
    """
    groups = Counter(group for group, _ in left_out)
    slower = sorted((-error, min(1.0, ROWS_OF_A_TAIL / groups[group])) for group, error in left_out)
    below = np.cumsum([weight for _, weight in slower])
    rank = int(np.searchsorted(below, 0.95 * (1.0 + 1.0 / len(slower)) * below[-1] - 1e-9))
    return round(max(slower[min(rank, len(slower) - 1)][0] / _NORMAL_P95, LEAST_ERROR), 4)


def residuals(rows: Sequence[MeasuredRun], left_out: Floats, base: Calibration) -> dict[str, Residual]:
    """Add the errors of the rows' cells to ``base``'s residuals.

    Few rows, or rows of one model, do not go below what ``base`` states: they do not show how others fare.
    """
    updated = dict(base.residuals)
    groups: dict[str, list[tuple[str, float, float]]] = {}
    for row, error in zip(rows, left_out.tolist(), strict=True):
        model, recipe, hardware, pipelines = row.setup.model, row.setup.recipe, row.setup.hardware, row.setup.pipelines
        key = cell_of(kind_of(model, recipe, base, pipelines=pipelines), hardware.gpu, recipe)
        # Every estimate adds again what splits and several nodes add: that is no part of a cell.
        own, _ = speed_source(base, model, recipe, hardware, 1 + pipelines, ["pipeline"] * pipelines)
        groups.setdefault(key, []).append((model.name, error, own.relative_error))
    for key, group in groups.items():
        stated = conformal([(name, error) for name, error, _ in group])
        if len(group) < ROWS_OF_A_TAIL or len({name for name, _, _ in group}) == 1:
            stated = max(stated, *(least for _, _, least in group))
        before = base.residuals.get(key, Residual(rows=0, relative_error=0.0))
        updated[key] = Residual(rows=before.rows + len(group), relative_error=stated)
    return updated


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """A calibration to ``rows``, with relative errors of predicted throughput, above 0 where predicted too fast.

    ``errors`` has those of the shipped calibration (before), of the new one (after), and of one that never saw the
    row's model (left_out), or where all are of one the row itself.
    """

    calibration: Calibration
    rows: Sequence[MeasuredRun]
    refused: Sequence[Refused]
    errors: dict[str, Floats]
    left_out_by: str


def calibrate(
    rows: Sequence[MeasuredRun], refused: Sequence[Refused], base: Calibration, *, origin: str
) -> CalibrationReport:
    """Fit a calibration to ``rows`` of ``origin``, from ``base``."""
    if not rows:
        first = f"; line {refused[0].line}: {refused[0].reason.splitlines()[0]}" if refused else ""
        raise InvalidInputError(
            f"{origin} holds {counted(0, 'run')} that can be used and {len(refused)} that cannot{first}",
            limit="at least 1",
            next_step="gpufleet calibrate --template prints the columns and an example",
        )
    left_out = left_out_errors(rows, lambda train: adapt(train, base))
    update = {
        "residuals": residuals(rows, left_out, base),
        "rows": base.rows + len(rows),
        "source": f"your {counted(len(rows), 'measured run')} ({origin}), on top of {base.source}",
        "as_of": datetime.now(UTC).date(),
    }
    calibration = adapt(rows, base).model_copy(update=update)
    log_error = {"before": log_errors(rows, base), "after": log_errors(rows, calibration), "left_out": left_out}
    models = {(row.suite, row.setup.model.name) for row in rows}
    return CalibrationReport(
        calibration=calibration,
        rows=rows,
        refused=refused,
        errors={when: throughput_error(error) for when, error in log_error.items()},
        left_out_by="model" if len(models) > 1 else "run",
    )
