"""Confidence: the error of a speed, by runs of its kind that were left out of the fit.

The calibration has an error by cell (a kind of run on a processor, in one code, in 8 bits or not) where runs of two
suites show it, and an error by kind for all other cells.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from optimizer.contract.hardware import Gpu, Precision
from optimizer.performance.calibration import POOLED, Calibration, Residual
from optimizer.performance.frameworks import DEFAULT, TRAINER, frameworks
from optimizer.performance.types import Hardware, Recipe
from optimizer.workload.model import ModelSpec

# Kinds of runs; code whose residuals have its name is a kind of its own, with " pipelines" where they span nodes.
DENSE, MIXTURE, ADAPTED = "dense decoder", "mixture of experts", "model with adapters"
ENCODER, CONVOLUTIONAL = "encoder", "convolutional network"
PIPELINES = " pipelines"
# A processor with this has rows in 8 bits alone; cells have it too.
EIGHT_BITS = " in 8 bits"

# Splits of plain PyTorch that runs on a GPU have (data/measured_runs.csv; a test compares); in fused kernels all were
# measured (nvidia_runs.csv). Another split has the error of an unmeasured GPU.
WRITTEN_SPLITS = {"H200": ("tensor", "context", "expert")}
SPLITS = ("tensor", "pipeline", "context", "expert")

# Standard deviation of the log of the speed of several nodes whose EFA passes through host memory: no run of ours or
# published training run has such nodes, and the two bandwidths that rates.py has are 0.56 and 0.06 of the network.
HOST_MEMORY_ERROR = math.log(2)


def kind_of(model: ModelSpec, recipe: Recipe, calibration: Calibration, *, pipelines: bool) -> str:
    """Kind of a run; ``pipelines``: a pipeline's stages are on several nodes."""
    if recipe.framework in calibration.residuals:
        return recipe.framework + PIPELINES * pipelines
    if model.experts:
        return MIXTURE
    if recipe.tuning.adapts:
        return ADAPTED
    if model.convolutional:
        return CONVOLUTIONAL
    return ENCODER if model.architecture == "encoder" else DENSE


def cell_of(kind: str, gpu: Gpu, recipe: Recipe) -> str:
    """Name the cell of a run."""
    return f"{kind} on {gpu.die} in {code_of(recipe)}" + EIGHT_BITS * (recipe.precision == "fp8")


def code_of(recipe: Recipe) -> str:
    """Name the code that was measured: the reference trainer is plain PyTorch."""
    return DEFAULT if recipe.framework == TRAINER else recipe.framework


def measured_splits(gpu: Gpu, framework: str) -> tuple[str, ...]:
    """Splits that measured runs on ``gpu`` have in code like ``framework``."""
    return SPLITS if frameworks()[framework].fused_kernels else WRITTEN_SPLITS.get(gpu.name, ())


def is_measured(calibration: Calibration, gpu: Gpu, precision: Precision) -> bool:
    """Tell if runs on this processor were measured, other than in 8 bits alone."""
    return gpu.die in calibration.matmul_efficiency and (
        precision == "fp8" or gpu.die + EIGHT_BITS not in calibration.residuals
    )


def speed_source(
    calibration: Calibration, model: ModelSpec, recipe: Recipe, hardware: Hardware, nodes: int, splits: Collection[str]
) -> tuple[Residual, str]:
    """The error of the speed of a layout with these splits, and its source; the largest error that applies counts."""
    pipelines = nodes > 1 and "pipeline" in splits
    kind, gpu, residuals = kind_of(model, recipe, calibration, pipelines=pipelines), hardware.gpu, calibration.residuals
    cell, new_gpu = cell_of(kind, gpu, recipe), residuals[POOLED].relative_error
    name = cell if cell in residuals else kind
    own = residuals.get(name, residuals[POOLED])
    further: dict[str, float] = {}
    if not is_measured(calibration, gpu, recipe.precision):
        bits = " but in 8 bits" * (gpu.die in calibration.matmul_efficiency)
        further[f"no measured run on {gpu.name}{bits}"] = new_gpu
    if code_of(recipe) not in calibration.overhead:
        further[f"no fitted run of {recipe.framework}"] = new_gpu
    if parts := " or ".join(model.unmeasured_parts(recipe.seq_len)):
        further[f"no measured run has {parts}"] = new_gpu
    if unmeasured := " or ".join(split for split in splits if split not in measured_splits(gpu, recipe.framework)):
        further[f"no measured run on {gpu.name} has {unmeasured} parallelism in code like {recipe.framework}"] = new_gpu
    if nodes > 1 and hardware.efa and not hardware.gpudirect:
        further["no measured run has several nodes with EFA and without GPUDirect RDMA"] = HOST_MEMORY_ERROR
    a = "an" if name.startswith(ENCODER) else "a"
    source = f"{own.rows} measured runs of {a} {name} (error {own.relative_error:.0%} on suites left out of the fit)"
    source += "".join(f"; {why}, so error {error:.0%}" for why, error in further.items() if error > own.relative_error)
    error = max(own.relative_error, *further.values(), 0.0)
    rows = own.rows if is_measured(calibration, gpu, recipe.precision) else 0
    return Residual(rows=rows, relative_error=error), f"{source}, fitted {calibration.as_of} to {calibration.source}"
