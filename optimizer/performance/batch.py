"""Many rows at once, each with its own model, GPU and configuration: what `gpufleet estimate --batch` computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optimizer.errors import GpufleetError
from optimizer.hardware import Gpu
from optimizer.performance.calibration import Calibration
from optimizer.performance.evaluate import evaluate_inputs
from optimizer.performance.inputs import stack
from optimizer.performance.runs import read_row, row_error

# Columns added to the input's, in this order. Tokens are samples for a CNN.
COLUMNS = (
    "predicted_tokens_per_second_per_gpu",
    "predicted_peak_memory_gib",
    "predicted_step_time_s",
    "fits",
    "error",
)


def estimate_rows(
    rows: Sequence[Mapping[str, Any]], gpus: Mapping[str, Gpu], calibration: Calibration
) -> list[dict[str, Any]]:
    """COLUMNS of each row, in order; a row that cannot be estimated has only ``error``.

    Args:
        rows: column name to value, as ``runs.read_row`` reads them.
        gpus: the GPU table by key.
        calibration: fitted numbers.
    """
    results: list[dict[str, Any]] = [dict.fromkeys(COLUMNS) for _ in rows]
    inputs, counts, places = [], [], []
    for place, row in enumerate(rows):
        try:
            read = read_row(row, gpus)
            inputs.append(read.inputs(calibration.coefficients(read.hardware.gpu, read.recipe)))
        except GpufleetError as error:
            results[place]["error"] = row_error(error)
            continue
        counts.append(read.gpus)
        places.append(place)
    if not inputs:
        return results
    # A number near the largest double may overflow on the way; such a row is told so below.
    with np.errstate(over="ignore", invalid="ignore"):
        estimates = evaluate_inputs(stack(inputs))
    for at, (place, count) in enumerate(zip(places, counts, strict=True)):
        speed = float(estimates.tokens_per_second[at]) / count
        values = (speed, float(estimates.peak_memory_gib[at]), float(estimates.step_time_s[at]))
        if not all(math.isfinite(value) and value > 0 for value in values):
            results[place]["error"] = "the row's numbers are too large or too small to estimate"
            continue
        results[place].update(zip(COLUMNS, (*values, bool(estimates.fits[at])), strict=False))
    return results
