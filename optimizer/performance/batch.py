"""Estimates of many rows at once: `gpufleet estimate --batch`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optimizer.contract.errors import GpufleetError
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import Calibration
from optimizer.performance.cells import Row
from optimizer.performance.evaluate import evaluate_inputs
from optimizer.performance.inputs import stack
from optimizer.performance.rows import read_row, row_error

# Columns added to the input's, in order. Tokens are samples for a CNN.
COLUMNS = (
    "predicted_tokens_per_second_per_gpu", "predicted_peak_memory_gib", "predicted_step_time_s", "fits", "error",
    "predicted_p95_memory_gib", "fit",
)  # fmt: skip


def estimate_rows(
    rows: Sequence[Mapping[str, Any]], gpus: Mapping[str, Gpu], calibration: Calibration
) -> list[dict[str, Any]]:
    """Estimate each row: its COLUMNS; a row that cannot be estimated has only ``error``."""
    results: list[dict[str, Any]] = [dict.fromkeys(COLUMNS) for _ in rows]
    inputs, counts, positions = [], [], []
    for position, row in enumerate(rows):
        try:
            setup = read_row(Row(row), gpus)
            inputs.append(setup.inputs(calibration))
        except GpufleetError as error:
            results[position]["error"] = row_error(error)
            continue
        counts.append(setup.gpus)
        positions.append(position)
    if not inputs:
        return results
    # An overflow gives the row an error below.
    with np.errstate(over="ignore", invalid="ignore"):
        estimates = evaluate_inputs(stack(inputs))
    for index, (position, count) in enumerate(zip(positions, counts, strict=True)):
        speed = float(estimates.tokens_per_second[index]) / count
        values = (speed, float(estimates.peak_memory_gib[index]), float(estimates.step_time_s[index]))
        if all(math.isfinite(value) and value > 0 for value in values):
            p95_gib, fit = float(estimates.p95_memory_gib[index]), str(estimates.fit[index])
            results[position] |= zip(COLUMNS, (*values, bool(estimates.fits[index]), None, p95_gib, fit), strict=True)
        else:
            results[position]["error"] = "the row's numbers are too large or too small to estimate"
    return results
