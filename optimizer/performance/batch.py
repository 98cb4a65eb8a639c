"""Estimates of many rows at once: `gpufleet estimate --batch`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optimizer.contract.errors import GpufleetError
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import Calibration, model_kind
from optimizer.performance.cells import Row
from optimizer.performance.evaluate import estimate_case
from optimizer.performance.rows import read_row, row_error

# Columns added to the input's, in order. Tokens are samples for a CNN.
COLUMNS = (
    "predicted_tokens_per_second_per_gpu", "predicted_peak_memory_gib", "predicted_step_time_s", "fits", "error",
    "predicted_p95_memory_gib", "fit", "predicted_relative_error",
)  # fmt: skip


def estimate_rows(
    rows: Sequence[Mapping[str, Any]], gpus: Mapping[str, Gpu], calibration: Calibration
) -> list[dict[str, Any]]:
    """Estimate each row: its COLUMNS; a row that cannot be estimated has only ``error``."""
    return [_estimate(row, gpus, calibration) for row in rows]


def _estimate(row: Mapping[str, Any], gpus: Mapping[str, Gpu], calibration: Calibration) -> dict[str, Any]:
    result: dict[str, Any] = dict.fromkeys(COLUMNS)
    try:
        setup = read_row(Row(row), gpus)
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow gives the row an error below
            estimates = estimate_case(setup.case(), setup.coefficients(calibration))
    except GpufleetError as error:
        return result | {"error": row_error(error)}
    speed = float(estimates.tokens_per_second) / setup.gpus
    values = (speed, float(estimates.peak_memory_gib), float(estimates.step_time_s))
    if not all(math.isfinite(value) and value > 0 for value in values):
        return result | {"error": "the row's numbers are too large or too small to estimate"}
    p95_gib, fit = float(estimates.p95_memory_gib), str(estimates.fit)
    recipe, gpu = setup.recipe, setup.hardware.gpu
    residual = calibration.residual(
        gpu, recipe.precision, recipe.framework, kind=model_kind(setup.model), pipelines=setup.pipelines
    )
    error = residual.relative_error
    return result | dict(zip(COLUMNS, (*values, bool(estimates.fits), None, p95_gib, fit, error), strict=True))
