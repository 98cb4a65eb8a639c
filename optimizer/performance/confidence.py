"""Confidence: how well measured runs cover a layout on its GPU, and the relative error that follows."""

from __future__ import annotations

import math
from collections.abc import Collection

from bootstrap.contract.fine_tuning import EIGHT_BIT
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import POOLED, Calibration, Residual, model_kind, residual_key
from optimizer.performance.frameworks import frameworks
from optimizer.performance.types import Hardware, Recipe
from optimizer.workload.model import ModelSpec

# Splits that measured runs on a GPU have (performance/data/measured_runs.csv; a test compares), in code with fused
# kernels (Megatron's) and in plain PyTorch: one's pipeline says little about the other's. A layout with another split
# has the error of an unmeasured GPU.
MEASURED_SPLITS = {
    ("A100", "fused"): ("tensor", "pipeline"),
    ("H100", "fused"): ("tensor", "pipeline"),
    ("H200", "written out"): ("tensor", "context", "expert"),
}

# Standard deviation of the log of the speed of several nodes whose EFA passes through host memory: no run of ours or
# published training run has such nodes, and the two bandwidths that rates.py has are 0.56 and 0.06 of the network.
HOST_MEMORY_ERROR = math.log(2)


def network_error(hardware: Hardware, nodes: int) -> float:
    """Least error of the speed of ``nodes`` nodes, by what is measured of their network."""
    return HOST_MEMORY_ERROR if nodes > 1 and hardware.efa and not hardware.gpudirect else 0.0


def measured_splits(gpu: Gpu, framework: str) -> tuple[str, ...]:
    """Splits that measured runs on ``gpu`` have in code like ``framework``."""
    fused = frameworks()[framework].fused_kernels
    return MEASURED_SPLITS.get((gpu.name, "fused" if fused else "written out"), ())


def unmeasured_parts(recipe: Recipe, model: ModelSpec) -> str:
    """Name the parts of a recipe and its model that no measured run has; the speed has an unmeasured GPU's error."""
    parts = [recipe.tuning.in_words, "pure bf16" if recipe.pure else ""]
    parts += ["8-bit moments"] * (recipe.optimizer == EIGHT_BIT)
    return " or ".join(part for part in (*parts, *model.unmeasured_parts(recipe.seq_len)) if part)


def speed_source(
    calibration: Calibration,
    model: ModelSpec,
    recipe: Recipe,
    hardware: Hardware,
    nodes: int,
    splits: Collection[str],
) -> tuple[Residual, str]:
    """The error of the speed of a layout with these splits on ``nodes`` nodes, and its source in words."""
    gpu, framework, pipelines = hardware.gpu, recipe.framework, nodes > 1 and "pipeline" in splits
    residual = calibration.residual(gpu, recipe.precision, framework, pipelines=pipelines)
    key = residual_key(gpu, recipe.precision, framework, pipelines=pipelines)
    error, pooled = residual.relative_error, calibration.residuals[POOLED].relative_error
    source = f"{residual.rows} measured runs on {key} (error {error:.0%} on models left out of the fit)"
    if not residual.rows:
        measured = ", ".join(name for name in calibration.residuals if " " not in name and name != POOLED)
        source = (
            f"no measured run on {key}: efficiency pooled from {measured} (error {error:.0%}, from leaving processors "
            "out of the fit)"
        )
    source += f", fitted {calibration.as_of} to {calibration.source}"
    if kind := model_kind(model):
        of_kind = calibration.of_kind(kind, framework)
        error = max(error, of_kind.relative_error)
        source += f"; {of_kind.rows or 'no'} measured runs of a {kind} judge this one, so error {error:.0%}"
    unmeasured = " or ".join(split for split in splits if split not in measured_splits(gpu, framework))
    if parts := unmeasured_parts(recipe, model):
        error = max(pooled, error)
        source += f"; no measured run has {parts}, so error {error:.0%}"
    elif unmeasured and error < pooled:
        error = pooled
        code = f"in code like {framework}"
        source += f"; no measured run on {gpu.name} has {unmeasured} parallelism {code}, so error {error:.0%}"
    if error < (least := network_error(hardware, nodes)):
        error = least
        source += f"; no measured run has several nodes with EFA and without GPUDirect RDMA, so error {error:.0%}"
    return Residual(rows=residual.rows, relative_error=error), source
