"""Confidence: how well measured runs cover a layout on its GPU, and the relative error that follows."""

from __future__ import annotations

from collections.abc import Collection

from optimizer.hardware import Gpu, Precision
from optimizer.performance.calibration import POOLED, Calibration, Residual, model_kind
from optimizer.performance.frameworks import framework_name, frameworks
from optimizer.workload.model import ModelSpec

# Splits that measured runs on a GPU have (performance/data/measured_runs.csv; a test compares), in code with fused
# kernels (Megatron's) and in plain PyTorch: one's pipeline says little about the other's. A layout with another split
# has the error of an unmeasured GPU.
MEASURED_SPLITS = {
    ("A100", "fused"): ("tensor", "pipeline"),
    ("H100", "fused"): ("tensor", "pipeline"),
    ("H200", "written out"): ("tensor", "context", "expert"),
}


def measured_splits(gpu: Gpu, framework: str) -> tuple[str, ...]:
    """Splits that measured runs on ``gpu`` have in code like ``framework``."""
    fused = frameworks()[framework_name(framework)].fused_kernels
    return MEASURED_SPLITS.get((gpu.name, "fused" if fused else "written out"), ())


def speed_source(
    calibration: Calibration,
    gpu: Gpu,
    precision: Precision,
    framework: str,
    model: ModelSpec,
    splits: Collection[str],
    gradient_compression: str = "none",
    parts: Collection[str] = (),
) -> tuple[Residual, str]:
    """The error of the speed of a layout with these splits, and its source in words; ``parts`` is unmeasured."""
    kind, pooled = model_kind(model), calibration.residuals[POOLED].relative_error
    residual = calibration.residual(gpu, precision, framework, kind=kind)
    source = calibration.describe(gpu, precision, framework, kind=kind)
    measured = measured_splits(gpu, framework)
    unmeasured = " or ".join(split for split in splits if split not in measured)
    if gradient_compression != "none" and residual.relative_error < pooled:
        note = f"no measured run on {gpu.name} has gradient compression {gradient_compression}"
        return Residual(rows=residual.rows, relative_error=pooled), f"{source}; {note}, so error {pooled:.0%}"
    if parts and residual.relative_error < pooled:
        note = f"no measured run has {' or '.join(parts)}"
        return Residual(rows=residual.rows, relative_error=pooled), f"{source}; {note}, so error {pooled:.0%}"
    if unmeasured and residual.relative_error < pooled:
        note = f"no measured run on {gpu.name} has {unmeasured} parallelism in code like {framework}"
        return Residual(rows=residual.rows, relative_error=pooled), f"{source}; {note}, so error {pooled:.0%}"
    return residual, source
