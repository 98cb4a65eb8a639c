"""Fits the shipped calibration to the shipped runs: ``python -m tools.calibration`` writes data/calibration.json.

The fit of ``optimizer.performance.fit``, with errors of models, processors and frameworks left out. nanotron's numbers
and those of the GPUs that only NVIDIA's runs show are added on top, and move no number of another's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime

import numpy as np
import pandas as pd
from scipy.stats import norm, t

from optimizer.catalog.gpus import gpu_table
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
from optimizer.performance.fit import adapt, fit_rows, key_of, left_out_errors, residuals
from optimizer.performance.measured_runs import (
    LEARNED,
    MANY_NODES,
    NVIDIA,
    PUBLIC,
    RUNS,
    MeasuredRun,
    learned_runs,
    log_errors,
    read_runs,
)
from optimizer.performance.types import Floats

# Two kinds of data-centre GPU that predict each other say little of a 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# Rows of the common error that a GPU's own is drawn to.
DRAWN_ROWS = 20


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
