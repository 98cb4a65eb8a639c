"""Fits the shipped calibration to the shipped runs: ``python -m tools.calibration`` writes data/calibration.json.

The fit of ``optimizer.performance.fit``, with errors of models, processors and frameworks left out. nanotron's numbers
and those of the GPUs that only NVIDIA's runs show are added on top, and move no number of another's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import (
    BY_PROCESSOR,
    CALIBRATION,
    FUSED,
    KINDS,
    MIXTURE,
    NEW_FRAMEWORK,
    POOLED,
    Calibration,
    Residual,
    model_kind,
)
from optimizer.performance.fit import START, adapt, factors_of, key_of, left_out_errors, residuals, robust, solve
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors, read_usable_runs, stack_tables
from optimizer.performance.table import estimate_case, stack, step_seconds
from optimizer.performance.types import Estimates, Floats

# Runs of nanotron on 1 to 32 nodes, whose numbers are added on top.
MANY_NODES = RUNS.with_name("many_nodes_runs.csv")
# Mixtures and adapters in NVIDIA's code, and its dense models on Blackwell: what they show is added on top.
NVIDIA = RUNS.with_name("nvidia_runs.csv")
# Published runs: the shipped calibration is fitted to suite LEARNED too, all others judge it (data/PROVENANCE.md).
PUBLIC = RUNS.with_name("public_runs.csv")
LEARNED = "dgxc-llama"
# Error of the equations, log units: rows of one suite share it, so the starts keep their say.
NOISE = 0.1
# Two kinds of data-centre GPU that predict each other say little of a 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# Rows of the common error that a GPU's own is drawn to.
DRAWN_ROWS = 20


def read_runs(path: Path, gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read a table of measured runs, all of them usable."""
    rows, refused, _ = read_usable_runs(path, gpus)
    if refused:
        raise InvalidInputError(
            f"{path} line {refused[0].line}: {refused[0].reason}",
            limit="a run with its throughput",
            why="a calibration never skips a measurement silently",
            next_step="mend or remove the line",
        )
    return rows


def learned_runs(gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read the published runs that the shipped calibration is fitted to beside RUNS."""
    return [row for row in read_runs(PUBLIC, gpus) if row.suite == LEARNED]


def predict(rows: Sequence[MeasuredRun], calibration: Calibration) -> Estimates:
    """Estimate the rows."""
    estimates = [estimate_case(row.setup.case(), row.setup.coefficients(calibration)) for row in rows]

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {part: join([value[part] for value in values]) for part in values[0]}
        return np.concatenate([np.ravel(value) for value in values])

    return Estimates(
        **{field.name: join([getattr(each, field.name) for each in estimates]) for field in fields(Estimates)}
    )


def fit_rows(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration without residuals to the measured time of one step of each run; suites weigh alike."""
    start: dict[str, Any] = {name: {POOLED: item.value} for name, item in START.items()}
    start["precision_efficiency"] = {}
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    base = Calibration(**start, residuals=nothing, rows=len(rows), source="", as_of=date.min)
    count = Counter(row.suite for row in rows)
    weights = np.sqrt([len(rows) / len(count) / count[row.suite] for row in rows]) / NOISE
    own = [factors_of(row.setup) for row in rows]
    used = {key for names in own for keys in names.values() for key in keys}
    spreads = {(field, key): START[field].spread if key == POOLED else START[field].group for field, key in used}
    return solve(rows, base, own, spreads, weights, (robust,))


def fit(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration to ``rows``, with residuals by GPU and for left-out processors, frameworks and kinds."""
    errors = left_out_errors(rows, lambda train: fit_rows(train or rows))
    table = pd.DataFrame(
        {
            "row": rows,
            "error": errors,
            "key": [key_of(row.setup) for row in rows],
            "kind": [model_kind(row.setup.model) for row in rows],
            "processor": [row.setup.hardware.gpu.die for row in rows],
            "framework": [row.setup.recipe.framework for row in rows],
        }
    )
    found = {}
    for key, own in table.groupby("key").error:
        drawn = math.sqrt(((own**2).sum() + DRAWN_ROWS * _rms(errors) ** 2) / (len(own) + DRAWN_ROWS))
        found[str(key)] = Residual(rows=len(own), relative_error=round(drawn, 4))
    new_gpu = _error_of_one_more(_left_out_group_errors(table, "processor", "framework"))
    new_framework = _error_of_one_more(_left_out_group_errors(table, "framework", "processor"))
    found[POOLED] = Residual(rows=0, relative_error=round(max(new_gpu, LEAST_ERROR_OF_A_NEW_GPU), 4))
    found[NEW_FRAMEWORK] = Residual(rows=0, relative_error=round(new_framework, 4))
    for kind in KINDS:
        kind_errors = table.error[table.kind == kind].tolist()
        found[kind] = Residual(rows=len(kind_errors), relative_error=round(_error_of_one_more(kind_errors), 4))
    return fit_rows(rows).model_copy(update={"residuals": found})


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


def fit_shipped() -> Calibration:
    """Fit the calibration that ships, but for its source and date."""
    gpus = gpu_table()
    fitted = fit([*read_runs(RUNS, gpus), *learned_runs(gpus)])
    return add_processors(read_runs(NVIDIA, gpus), add_framework(read_runs(MANY_NODES, gpus), fitted))


def _left_out_group_errors(table: pd.DataFrame, column: str, other: str) -> list[float]:
    """Errors of predicting each value of ``column`` from a fit to the rest, where it knows ``other``."""
    errors = []
    for value, left in table.groupby(column):
        rest = table[table[column] != value]
        left = left[left[other].isin(rest[other])]
        if len(left) and len(rest):
            fitted = fit_rows(rest.row.tolist())
            steps, measured = stack_tables(left.row.tolist()), [row.step_time_s for row in left.row]
            if column == "processor":  # the power limit of an unknown GPU
                steps.rates.throttling = np.zeros(len(left))
            own = stack([row.setup.coefficients(fitted) for row in left.row])
            errors.append(_rms(np.log(sum(step_seconds(steps, own).values()) / np.array(measured))))
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


def main() -> None:
    """Write the shipped calibration."""
    gpus = gpu_table()
    rows, published = read_runs(RUNS, gpus), len(learned_runs(gpus))
    suites = ", ".join(sorted({row.suite for row in rows}))
    digest = hashlib.sha256(RUNS.read_bytes()).hexdigest()[:12]
    source = (
        f"{len(rows)} measured runs of {suites} ({RUNS.name}, sha256 {digest}) and {published} published ones "
        f"({PUBLIC.name}, {LEARNED}); Blackwell and L40S: {NVIDIA.name}"
    )
    today: date = datetime.now(UTC).date()
    fitted = fit_shipped().model_copy(update={"source": source, "as_of": today})
    CALIBRATION.write_text(fitted.model_dump_json(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
