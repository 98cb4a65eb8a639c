"""How sure the speed of a layout is: whether measured runs on its GPU have its kinds of parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from optimizer.hardware import Gpu, Precision
from optimizer.performance.calibration import POOLED, Calibration, Residual, model_kind
from optimizer.performance.frameworks import framework_name, frameworks
from optimizer.search import layouts
from optimizer.workload.model import ModelSpec

# Kinds of parallelism that measured runs on a GPU have (performance/data/measured_runs.csv; a test compares), in code
# with fused kernels (Megatron's) and in plain PyTorch: what one's pipeline costs says little of the other's. With any
# other the speed is as sure as that of a GPU nobody measured.
MEASURED_AXES = {
    ("A100", "fused"): ("tensor", "pipeline"),
    ("H100", "fused"): ("tensor", "pipeline"),
    ("H200", "written out"): ("tensor", "context", "expert"),
}


def measured_axes(gpu: Gpu, framework: str) -> tuple[str, ...]:
    """Kinds of parallelism, besides data parallelism, that measured runs on ``gpu`` have in code like ``framework``."""
    fused = frameworks()[framework_name(framework)].fused_kernels
    return MEASURED_AXES.get((gpu.name, "fused" if fused else "written out"), ())


def unmeasured_note(gpu: Gpu, framework: str, ranks: Mapping[str, int]) -> str:
    """What no measured run on ``gpu`` has of a layout (ranks by kind of parallelism), in words; empty if it has all."""
    known = measured_axes(gpu, framework)
    kinds = [axis for axis in layouts.SPLITS if axis not in known and ranks[axis] > 1]
    what = f"{' or '.join(kinds)} parallelism in code like {framework}"
    return f"no measured run on {gpu.name} has {what}" if kinds else ""


def speed_source(
    calibration: Calibration, gpu: Gpu, precision: Precision, framework: str, model: ModelSpec, ranks: Mapping[str, int]
) -> tuple[Residual, str]:
    """How sure the speed of a layout (ranks by kind of parallelism) is, and where it comes from, in words."""
    kind, unsure = model_kind(model), calibration.residuals[POOLED].relative_error
    residual = calibration.residual(gpu, precision, framework, kind=kind)
    source = calibration.describe(gpu, precision, framework, kind=kind)
    note = unmeasured_note(gpu, framework, ranks)
    if note and residual.relative_error < unsure:
        return Residual(rows=residual.rows, relative_error=unsure), f"{source}; {note}, so error {unsure:.0%}"
    return residual, source
