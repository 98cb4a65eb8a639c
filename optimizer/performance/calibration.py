"""Calibration: fitted numbers of the time model with their errors; `gpufleet calibrate` writes it."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from optimizer.contract.errors import DataMissingError, describe_invalid
from optimizer.contract.hardware import Gpu
from optimizer.performance.frameworks import frameworks
from optimizer.performance.types import Number, Recipe

CALIBRATION = Path(__file__).parent / "data" / "calibration.json"
POOLED = "pooled"
FUSED = " fused"
BY_PROCESSOR = ("matmul_efficiency", "attention_efficiency")
# 0 for code without runs on several nodes that show them.
OF_MANY_NODES = ("network_call_s", "tensor_hop_s", "pipeline_hop_s")

Key = tuple[str, str]  # field of Calibration, and the key in it
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Fitted numbers of one GPU and recipe: fields of Calibration."""

    matmul_efficiency: Number = 1.0
    attention_efficiency: Number = 1.0
    elementwise_traffic: Number = 1.0
    overhead: Number = 1.0
    host_s_per_layer: Number = 1.0
    network_efficiency: Number = 1.0
    network_call_s: Number = 1.0
    tensor_hop_s: Number = 1.0
    pipeline_hop_s: Number = 1.0


BY_FRAMEWORK = tuple(field.name for field in fields(Coefficients) if field.name not in BY_PROCESSOR)


class Residual(BaseModel):
    """Distance of predictions from measurements on one group of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(ge=0)
    relative_error: float = Field(
        ge=0, description="95th percentile of log(measured / predicted) step time, over 1.645."
    )


class Calibration(BaseModel):
    """Fitted numbers by GPU or framework, with "pooled" for all others.

    Attributes:
        matmul_efficiency: share of dense peak in large matrix products, by processor and "processor MXFP8".
        attention_efficiency: share of dense peak in attention, by processor and "processor framework": kernels differ.
        elementwise_traffic: bytes that element-wise kernels really move over those counted, by framework, as all below.
        precision_efficiency: factor on the matrix products' efficiency, by precision, and on attention's.
        overhead: GPU time of a run over the sum of its kernels'.
        host_s_per_layer: host time to launch a layer's forward and backward pass.
        network_efficiency: factor on the network bandwidth that nccl-tests reach.
        network_call_s: time of a collective of data ranks on several nodes beyond its bytes.
        tensor_hop_s: time of a tensor collective a rank, where tensor ranks span nodes.
        pipeline_hop_s: the same where a pipeline spans nodes.
        residuals: by cell and by kind of run (confidence.py), on suites left out of the fit or from a user's runs;
            "pooled" on processors left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    matmul_efficiency: dict[str, Share]
    attention_efficiency: dict[str, Share]
    elementwise_traffic: dict[str, Share]
    precision_efficiency: dict[str, Share]
    overhead: dict[str, Share]
    host_s_per_layer: dict[str, Seconds]
    network_efficiency: dict[str, Share]
    network_call_s: dict[str, Seconds] = {POOLED: 0.0}
    tensor_hop_s: dict[str, Seconds] = {POOLED: 0.0}
    pipeline_hop_s: dict[str, Seconds] = {POOLED: 0.0}
    residuals: dict[str, Residual]
    rows: int
    source: str
    as_of: date

    @model_validator(mode="after")
    def _has_pooled(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, dict) and name != "precision_efficiency" and POOLED not in value:
                raise ValueError(f"{name} has no value named {POOLED}")
        if "new framework" in self.residuals:
            raise ValueError("its errors are those of an earlier version, by kind of run alone")
        return self

    def values(self, gpu: Gpu, recipe: Recipe) -> dict[str, dict[str, float]]:
        """Look up each coefficient's factors by field: the most special that is known."""
        # Unmeasured code may use the kernels of measured code.
        known = recipe.framework in self.elementwise_traffic
        framework = recipe.framework if known else frameworks()[recipe.framework].fitted_as or recipe.framework
        return {
            name: {field: getattr(self, field)[key] for field, key in keys if key in getattr(self, field)}
            for name, keys in factors(gpu.die, framework, recipe).items()
        }

    def coefficients(self, gpu: Gpu, recipe: Recipe) -> Coefficients:
        """Compute the coefficients of one GPU and recipe."""
        return Coefficients(**{name: math.prod(found.values()) for name, found in self.values(gpu, recipe).items()})


def factors(processor: str, framework: str, recipe: Recipe) -> dict[str, list[Key]]:
    """List the factors of each coefficient, in each field the most general first."""
    names = {name: [(name, POOLED), (name, framework)] for name in BY_FRAMEWORK}
    names |= {name: [(name, POOLED), (name, processor)] for name in BY_PROCESSOR}
    names["attention_efficiency"].append(("attention_efficiency", f"{processor} {framework}"))
    if recipe.scales_blocks:
        names["matmul_efficiency"].append(("matmul_efficiency", f"{processor} MXFP8"))
    precision = recipe.precision
    # 8 bits have a factor of their own in fused kernels, which cast otherwise; attention in 32 bits a slower kernel.
    fused = FUSED if precision == "fp8" and frameworks()[framework].fused_kernels else ""
    if precision not in ("fp16", "bf16"):
        names["matmul_efficiency"].append(("precision_efficiency", precision + fused))
    if precision in ("fp32", "tf32"):
        names["attention_efficiency"].append(("precision_efficiency", "32-bit attention"))
    return names


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file; DataMissingError if it is missing or none."""
    try:
        return Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = describe_invalid(error)[0] if isinstance(error, ValidationError) else error
        raise DataMissingError(
            f"{path} cannot be used: {reason}",
            why="without a calibration every speed would be a guess",
            next_step="gpufleet calibrate RUNS.csv --out FILE writes one",
        ) from error


@functools.cache
def load() -> Calibration:
    """Read the shipped calibration."""
    return read_calibration(CALIBRATION)
