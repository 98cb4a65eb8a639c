"""Fit the calibration to measured runs: `python -m optimizer.performance.calibrate [RUNS.csv] [--out FILE]`.

Minimises the squared error of log step time, with a robust loss (a few published runs are of code known to be slow)
and each suite weighted alike, by Levenberg-Marquardt over the logarithms of the coefficients. A GPU's or framework's
own value is drawn to the pooled one, so few rows move it little.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.hardware import Gpu
from optimizer.performance.calibration import (
    CALIBRATION,
    POOLED,
    Calibration,
    Residual,
    attention_precision,
    die,
    residual_key,
)
from optimizer.performance.evaluate import evaluate_inputs
from optimizer.performance.frameworks import framework_name
from optimizer.performance.inputs import Coefficients, stack
from optimizer.performance.runs import RowRun, read_row
from optimizer.performance.types import Estimates, Floats

RUNS = Path(__file__).parent / "data" / "measured_runs.csv"


# Start of the fit and how far, in log units, it may move: wide enough that the data decide, except where no row speaks.
# The spread of a group is how far its own value may be from the pooled one.
@dataclass(frozen=True, slots=True)
class _Start:
    """Where the fit of one coefficient starts, and how far it may move, in log units.

    Attributes:
        value: start of the pooled value.
        spread: of the pooled value around its start; 0 keeps it.
        group: of a GPU's or framework's own value around the pooled one.
        most: upper bound, where one exists by meaning.
    """

    value: float
    spread: float
    group: float
    most: float = math.inf


# Starts: a bf16 matrix product of 8192 cubed reaches 0.79 of peak on H200 (torch 2.11, measured 2026-11-04): 0.85 at
# any width, with 200 for the half width (1 + 3 x 200 / 8192).
START = {
    "matmul_efficiency": _Start(0.85, 0.05, 0.05, most=1.0),
    "matmul_half_width": _Start(200.0, 0.5, 0.3),
    "attention_efficiency": _Start(0.4, 0.5, 0.5, most=1.0),
    "elementwise_traffic": _Start(1.0, 0.5, 0.5),
    "precision_efficiency": _Start(1.0, 0.0, 0.3),
    "host_s_per_layer": _Start(1.0e-3, 1.0, 1.0),
    "host_s_per_step": _Start(5e-3, 0.5, 0.5),
    "exposed_communication": _Start(0.5, 0.5, 0.5, most=1.0),
    "network_efficiency": _Start(1.0, 0.2, 0.4),
}
COEFFICIENTS = tuple(field.name for field in fields(Coefficients))
BY_DIE = ("matmul_efficiency", "matmul_half_width")
# Error the equations themselves have, in log units: rows of one suite share it, so many rows are not many proofs, and
# the starts above keep their say.
NOISE = 0.1
HUBER = 0.2  # beyond this log error a row counts linearly, not squared


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One measured run."""

    row_id: str
    suite: str
    run: RowRun
    tokens_per_second_per_gpu: float
    peak_memory_gib: float | None

    @property
    def step_time_s(self) -> float:
        """Measured time of one optimizer step, from the throughput."""
        grid = self.run.grid
        samples = float(np.asarray(grid.data) * np.asarray(grid.micro_batch) * np.asarray(grid.grad_accum))
        return samples * self.run.run.seq_len / (self.tokens_per_second_per_gpu * self.run.gpus)


def read_runs(path: Path, gpus: Mapping[str, Gpu]) -> list[Measured]:
    """Read measured runs.

    Raises:
        InvalidInputError: the file cannot be read, a row cannot be estimated or has no throughput, or there is none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            run = read_row(row, gpus)
            speed = float(row["tokens_per_second_per_gpu"])
        except (GpufleetError, KeyError, ValueError) as error:
            raise InvalidInputError(
                f"{path} line {number}: {error}",
                limit="a run with its throughput",
                why="a calibration never skips a measurement silently",
                next_step="mend or remove the line",
            ) from error
        peak = float(row["peak_memory_gib"]) if row.get("peak_memory_gib") else None
        found.append(
            Measured(
                row_id=row.get("row_id", str(number)),
                suite=row.get("suite", ""),
                run=run,
                tokens_per_second_per_gpu=speed,
                peak_memory_gib=peak,
            )
        )
    if not found:
        raise InvalidInputError(f"{path} holds no rows", limit="at least one measured run")
    return found


def predict(rows: Sequence[Measured], calibration: Calibration) -> Estimates:
    """Estimates of the rows, in their order."""
    return evaluate_inputs(
        stack([row.run.inputs(calibration.coefficients(row.run.hardware.gpu, row.run.run)) for row in rows])
    )


def log_errors(rows: Sequence[Measured], calibration: Calibration) -> Floats:
    """log(predicted / measured) step time of each row."""
    measured = np.array([row.step_time_s for row in rows])
    return np.asarray(np.log(predict(rows, calibration).step_time_s / measured))


def fit(rows: Sequence[Measured], *, source: str, as_of: date, command: str) -> Calibration:
    """Fit a calibration to ``rows``, with residuals by GPU and, for other GPUs, from leaving one processor out.

    Raises:
        InvalidInputError: there are no rows.
    """
    if not rows:
        raise InvalidInputError("no measured runs", limit="at least one")
    coefficients = fit_coefficients(rows)
    errors = cross_validated_errors(rows)
    keys = [residual_key(row.run.hardware.gpu, row.run.run.precision) for row in rows]
    residuals = {}
    for key in sorted(set(keys)):
        own_errors = errors[[index for index, own_key in enumerate(keys) if own_key == key]]
        residuals[key] = Residual(rows=len(own_errors), relative_error=round(_rms(own_errors), 4))
    left_out = []
    for processor in sorted({die(row.run.hardware.gpu) for row in rows}):
        others = [row for row in rows if die(row.run.hardware.gpu) != processor]
        # What a new GPU adds: its rows of frameworks that are known from other GPUs.
        known = {framework_name(row.run.run.framework) for row in others}
        own = [
            row
            for row in rows
            if die(row.run.hardware.gpu) == processor and framework_name(row.run.run.framework) in known
        ]
        if own and others:
            left_out.append(_rms(log_errors(own, with_coefficients(fit_coefficients(others)))))
    residuals[POOLED] = Residual(rows=0, relative_error=round(_error_of_a_new_one(left_out), 4))
    return Calibration(**coefficients, residuals=residuals, rows=len(rows), source=source, as_of=as_of, command=command)


def with_coefficients(values: Mapping[str, Any]) -> Calibration:
    """A calibration to predict with while fitting: it has coefficients and no residuals yet."""
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    return Calibration(**values, residuals=nothing, rows=0, source="", as_of=date.min, command="")


FOLDS = 8


def cross_validated_errors(rows: Sequence[Measured]) -> Floats:
    """log(predicted / measured) step time of each row, from a fit that never saw its model in its suite.

    A fit's own rows would flatter it: a plan is for a model that nobody measured.
    """
    groups = sorted({(row.suite, row.run.model.name) for row in rows})
    errors = np.zeros(len(rows))
    for fold in range(min(FOLDS, len(groups))):
        held = set(groups[fold::FOLDS])
        test = [index for index, row in enumerate(rows) if (row.suite, row.run.model.name) in held]
        train = [row for row in rows if (row.suite, row.run.model.name) not in held]
        fitted = with_coefficients(fit_coefficients(train or rows))
        errors[test] = log_errors([rows[index] for index in test], fitted)
    return errors


# Quantile of Student's t at which a normal distribution has its standard deviation (0.8413), by degrees of freedom.
T_QUANTILE = {1: 1.837, 2: 1.321, 3: 1.197, 4: 1.142, 5: 1.111, 6: 1.091, 7: 1.077, 8: 1.067, 9: 1.059}


def _error_of_a_new_one(left_out: Sequence[float]) -> float:
    """Standard error of predicting one more processor from the errors made on those left out in turn.

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


def fit_coefficients(rows: Sequence[Measured]) -> dict[str, Any]:
    """Levenberg-Marquardt; returns the fields of Calibration that are fitted."""
    problem = _Problem(rows)
    theta = np.zeros(len(problem.names))
    damping = 1e-2
    residual = problem.residuals(theta)
    cost = float(residual @ residual)
    for _ in range(60):
        step = 1e-4
        jacobian = np.stack(
            [(problem.residuals(theta + step * unit) - residual) / step for unit in np.eye(len(theta))], axis=1
        )
        gradient, curvature = jacobian.T @ residual, jacobian.T @ jacobian
        while damping < 1e6:
            candidate = theta - np.linalg.solve(curvature + damping * np.eye(len(theta)), gradient)
            new = problem.residuals(candidate)
            if float(new @ new) < cost:
                break
            damping *= 4
        else:
            break
        improved = cost - float(new @ new)
        theta, residual, cost, damping = candidate, new, float(new @ new), damping / 4
        if improved < 1e-6 * cost:
            break
    return problem.fields(theta)


class _Problem:
    """The parameters to fit, in log units from START, and the residuals they give."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.dies = sorted({die(row.run.hardware.gpu) for row in rows})
        self.frameworks = sorted({framework_name(row.run.run.framework) for row in rows})
        self.pairs = sorted({f"{die(row.run.hardware.gpu)} {framework_name(row.run.run.framework)}" for row in rows})
        precisions = {str(row.run.run.precision) for row in rows}
        self.precisions = sorted(precisions & {"fp32", "tf32", "fp8"})
        if precisions & {"fp32", "tf32"}:
            self.precisions.append(attention_precision("fp32"))
        groups: dict[str, list[str]] = {
            "matmul_efficiency": self.dies,
            "matmul_half_width": self.dies,
            "attention_efficiency": [*self.dies, *self.pairs],
            "elementwise_traffic": self.frameworks,
            "precision_efficiency": self.precisions,
            "host_s_per_layer": self.frameworks,
            "host_s_per_step": self.frameworks,
            "exposed_communication": self.frameworks,
            "network_efficiency": self.frameworks,
        }
        self.names: list[tuple[str, str]] = []
        spreads = []
        for field, members in groups.items():
            start = START[field]
            if start.spread:
                self.names.append((field, POOLED))
                spreads.append(start.spread)
            for member in members:
                self.names.append((field, member))
                spreads.append(start.group)
        self.spreads = np.array(spreads)
        self.measured = np.log([row.step_time_s for row in rows])
        count = {suite: sum(row.suite == suite for row in rows) for suite in {row.suite for row in rows}}
        self.weights = np.sqrt([len(rows) / len(count) / count[row.suite] for row in rows])
        self.keys = [
            (die(row.run.hardware.gpu), framework_name(row.run.run.framework), row.run.run.precision) for row in rows
        ]
        any_coefficients = Coefficients(**dict.fromkeys(COEFFICIENTS, 1.0))
        self.inputs = stack([row.run.inputs(any_coefficients) for row in rows])

    @staticmethod
    def key(name: str, processor: str, framework: str, _: str) -> str:
        """What a coefficient of one row is kept under."""
        if name == "attention_efficiency":
            return f"{processor} {framework}"
        return processor if name in BY_DIE else framework

    def fields(self, theta: Floats) -> dict[str, Any]:
        """The fitted fields of Calibration."""
        by_name = dict(zip(self.names, theta, strict=True))
        values: dict[str, dict[str, float]] = {field: {} for field in START}
        for field, key in self.names:
            log = self.log(by_name, field, key)
            values[field][key] = float(f"{min(START[field].value * math.exp(log), START[field].most):.4g}")
        return values

    @staticmethod
    def log(by_name: Mapping[tuple[str, str], float], field: str, key: str) -> float:
        """Log of a coefficient over its start: pooled, and a processor's, framework's or pair's own part."""
        names = [POOLED, key]
        if field == "attention_efficiency" and " " in key:
            names.insert(1, key.split()[0])
        return float(sum(by_name.get((field, name), 0.0) for name in dict.fromkeys(names)))

    def residuals(self, theta: Floats) -> Floats:
        by_name = dict(zip(self.names, theta, strict=True))

        columns: dict[str, Floats] = {}
        for name in COEFFICIENTS:
            log = np.array([self.log(by_name, name, self.key(name, *key)) for key in self.keys])
            if name in ("matmul_efficiency", "attention_efficiency"):
                attends = name == "attention_efficiency"
                keys = [attention_precision(key[2]) if attends else key[2] for key in self.keys]
                log = log + np.array([by_name.get(("precision_efficiency", key), 0.0) for key in keys])
            columns[name] = np.minimum(START[name].value * np.exp(log), START[name].most)
        predicted = np.log(evaluate_inputs(replace(self.inputs, coefficients=Coefficients(**columns))).step_time_s)
        error = predicted - self.measured
        size = np.abs(error)
        robust = np.where(size <= HUBER, error, np.sign(error) * np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0)))
        return np.concatenate([self.weights * robust / NOISE, theta / self.spreads])


@click.command()
@click.argument("runs", type=click.Path(path_type=Path, dir_okay=False), default=RUNS)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=CALIBRATION, show_default=False)
def main(runs: Path, out: Path) -> None:
    """Fit the calibration to measured runs and write it."""
    from optimizer.catalog.gpus import gpu_table

    rows = read_runs(runs, gpu_table())
    suites = ", ".join(sorted({row.suite for row in rows}))
    calibration = fit(
        rows,
        source=f"{len(rows)} measured runs of {suites} (optimizer/performance/data/PROVENANCE.md)",
        as_of=datetime.now(UTC).date(),
        command=f"python -m optimizer.performance.calibrate {runs.name}",
    )
    out.write_text(calibration.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for name, residual in calibration.residuals.items():
        click.echo(f"{name}: {residual.rows} rows, error {residual.relative_error:.1%}", err=True)


if __name__ == "__main__":
    main()
