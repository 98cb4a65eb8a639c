"""Calibration: fitted numbers of the time model with their errors; `gpufleet calibrate` writes it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from optimizer.contract.errors import DataMissingError
from optimizer.contract.hardware import Gpu, Precision
from optimizer.performance.frameworks import DEFAULT, TRAINER, frameworks
from optimizer.performance.types import Number, Recipe
from optimizer.workload.model import ModelSpec

CALIBRATION = Path(__file__).parent / "data" / "calibration.json"
POOLED = "pooled"
NEW_FRAMEWORK = "new framework"
FUSED = " fused"
PIPELINES = " pipelines"
# Kinds of models with a residual of their own.
MIXTURE, CONVOLUTIONAL = "mixture of experts", "convolutional network"
KINDS = (MIXTURE, CONVOLUTIONAL)
BY_PROCESSOR = ("matmul_efficiency", "matmul_traffic", "attention_efficiency")
# 0 for code without runs on several nodes that show them.
OF_MANY_NODES = ("network_call_s", "tensor_hop_s", "pipeline_hop_s")
BY_FRAMEWORK = (
    "elementwise_traffic", "overhead", "kernel_s", "host_s_per_layer", "host_s_per_step", "exposed_communication",
    "network_efficiency", "network_call_s", "tensor_hop_s", "pipeline_hop_s",
)  # fmt: skip

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Fitted numbers of one GPU and recipe: fields of Calibration."""

    matmul_efficiency: Number = 1.0
    matmul_traffic: Number = 1.0
    attention_efficiency: Number = 1.0
    elementwise_traffic: Number = 1.0
    overhead: Number = 1.0
    kernel_s: Number = 1.0
    host_s_per_layer: Number = 1.0
    host_s_per_step: Number = 1.0
    exposed_communication: Number = 1.0
    network_efficiency: Number = 1.0
    network_call_s: Number = 1.0
    tensor_hop_s: Number = 1.0
    pipeline_hop_s: Number = 1.0


class Residual(BaseModel):
    """Distance of predictions from measurements on one group of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(ge=0)
    relative_error: float = Field(ge=0, description="Standard deviation of log(predicted / measured) step time.")


class Calibration(BaseModel):
    """Fitted numbers by GPU or framework, with "pooled" for all others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matmul_efficiency: dict[str, Share] = Field(
        description="Share of dense peak in large matrix products, by processor."
    )
    matmul_traffic: dict[str, Share] = Field(
        description="Side of a matrix product that costs as much again as its volume, by processor."
    )
    attention_efficiency: dict[str, Share] = Field(
        description='Share of dense peak in attention, by processor and by "processor framework": kernels differ.'
    )
    elementwise_traffic: dict[str, Share] = Field(
        description="Bytes that element-wise kernels really move over those counted, by framework."
    )
    precision_efficiency: dict[str, Share] = Field(
        description="Factor on the matrix products' efficiency, by precision, and on attention's."
    )
    overhead: dict[str, Share] = Field(description="GPU time of a run over the sum of its kernels', by framework.")
    kernel_s: dict[str, Seconds] = Field(description="GPU time a kernel takes to start and to drain, seconds.")
    host_s_per_layer: dict[str, Seconds] = Field(
        description="Host time to launch a layer's forward and backward pass, seconds, by framework."
    )
    host_s_per_step: dict[str, Seconds] = Field(description="Fixed host time of a step, seconds, by framework.")
    exposed_communication: dict[str, Seconds] = Field(
        description="Share of data-parallel communication that shows although computation runs beside it, by framework."
    )
    network_efficiency: dict[str, Share] = Field(
        description="Factor on the network bandwidth nccl-tests reach, by framework."
    )
    network_call_s: dict[str, Seconds] = Field(
        default={POOLED: 0.0},
        description="Time of a collective of data ranks on several nodes beyond its bytes, seconds, by framework.",
    )
    tensor_hop_s: dict[str, Seconds] = Field(
        default={POOLED: 0.0},
        description="Time of a tensor collective a rank, where tensor ranks span nodes, seconds, by framework.",
    )
    pipeline_hop_s: dict[str, Seconds] = Field(
        default={POOLED: 0.0}, description="The same where a pipeline spans nodes, seconds, by framework."
    )
    residuals: dict[str, Residual] = Field(
        description='By GPU and width, on models left out of the fit; "pooled" for other GPUs, "new framework" for '
        "training code no measured run used, on processors and on frameworks left out; a kind of KINDS on "
        'models of that kind left out, with " fused" in fused kernels.'
    )
    rows: int
    source: str
    as_of: date

    @model_validator(mode="after")
    def _has_pooled(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, dict) and name != "precision_efficiency" and POOLED not in value:
                raise ValueError(f"{name} has no value named {POOLED}")
        return self

    def coefficients(self, gpu: Gpu, recipe: Recipe) -> Coefficients:
        """Look up the coefficients of one GPU and recipe."""
        framework = recipe.framework
        # Unmeasured code may use the kernels of measured code.
        if framework not in self.elementwise_traffic:
            framework = frameworks()[framework].fitted_as or framework
        processor = gpu.die
        factor = self.precision_efficiency.get(product_precision(recipe.precision, framework), 1.0)
        attention_factor = self.precision_efficiency.get(attention_precision(recipe.precision), 1.0)
        attention = _lookup(self.attention_efficiency, f"{processor} {framework}", processor)
        return Coefficients(
            matmul_efficiency=_lookup(self.matmul_efficiency, processor) * factor,
            matmul_traffic=_lookup(self.matmul_traffic, processor),
            attention_efficiency=attention * attention_factor,
            **{name: _lookup(getattr(self, name), framework) for name in BY_FRAMEWORK},
        )

    def residual(
        self,
        gpu: Gpu,
        precision: Precision = "bf16",
        framework: str = DEFAULT,
        *,
        kind: str | None = None,
        pipelines: bool = False,
    ) -> Residual:
        """Rows behind this GPU's speed in the precision's width, and their error.

        Frameworks without rows and models of a kind have at least the error of left-out ones. ``pipelines``: a
        pipeline's stages are on several nodes.
        """
        if kind:
            any_kind, own = (
                self.residual(gpu, precision, framework, pipelines=pipelines),
                self._of_kind(kind, framework),
            )
            return Residual(rows=any_kind.rows, relative_error=max(any_kind.relative_error, own.relative_error))
        unknown = Residual(rows=0, relative_error=self.residuals[POOLED].relative_error)
        residual = self.residuals.get(residual_key(gpu, precision, framework, pipelines=pipelines), unknown)
        if (DEFAULT if framework == TRAINER else framework) in self.overhead:
            return residual
        new = self.residuals.get(NEW_FRAMEWORK, unknown)
        return Residual(rows=residual.rows, relative_error=max(residual.relative_error, new.relative_error))

    def _of_kind(self, kind: str, framework: str) -> Residual:
        own = self.residuals.get(kind + FUSED) if frameworks()[framework].fused_kernels else None
        return own or self.residuals.get(kind) or Residual(rows=0, relative_error=math.log(2))

    def describe(
        self,
        gpu: Gpu,
        precision: Precision = "bf16",
        framework: str = DEFAULT,
        *,
        kind: str | None = None,
        pipelines: bool = False,
    ) -> str:
        """Describe the source of this GPU's speed in one sentence."""
        residual = self.residual(gpu, precision, framework, kind=kind, pipelines=pipelines)
        if kind:
            any_kind = self.describe(gpu, precision, framework, pipelines=pipelines)
            rows = self._of_kind(kind, framework).rows or "no"
            return (
                f"{any_kind}; {rows} measured runs of a {kind} judge this one, so error {residual.relative_error:.0%}"
            )
        key = residual_key(gpu, precision, framework, pipelines=pipelines)
        error = f"error {residual.relative_error:.0%} on models left out of the fit"
        if residual.rows:
            return f"{residual.rows} measured runs on {key} ({error}), fitted {self.as_of} to {self.source}"
        gpus = [
            name
            for name in self.residuals
            if name not in (POOLED, NEW_FRAMEWORK, *KINDS, MIXTURE + FUSED) and "-bit" not in name
        ]
        gpus = [name for name in gpus if not frameworks().keys() & set(name.split())]
        measured = ", ".join(gpus)
        return (
            f"no measured run on {key}: efficiency pooled from {measured} (error "
            f"{residual.relative_error:.0%}, from leaving processors out of the fit), fitted {self.as_of} to "
            f"{self.source}"
        )


def model_kind(model: ModelSpec) -> str | None:
    """Kind of KINDS of a model, if any."""
    if model.experts:
        return MIXTURE
    return CONVOLUTIONAL if model.convolutional else None


def residual_key(gpu: Gpu, precision: str, framework: str, *, pipelines: bool = False) -> str:
    """Key of a GPU's residual: its name, the width if not 16 bits, " fused" for 8 bits in fused kernels, and the
    framework if its error is its own, with " pipelines" where they span nodes.
    """
    width = {"fp32": " 32-bit", "tf32": " 32-bit", "fp8": " 8-bit"}.get(precision, "")
    profile = frameworks()[framework]
    fused = FUSED if precision == "fp8" and profile.fused_kernels else ""
    if not profile.own_error:
        return gpu.name + width + fused
    return f"{gpu.name}{width}{fused} {framework}" + (PIPELINES if pipelines else "")


def product_precision(precision: str, framework: str) -> str:
    """Key of the products' factor: 8 bits have a factor of their own in fused kernels, which cast otherwise."""
    return precision + (FUSED if precision == "fp8" and frameworks()[framework].fused_kernels else "")


def attention_precision(precision: str) -> str:
    """Key of attention's factor: 32 bits run a slower kernel."""
    return "32-bit attention" if precision in ("fp32", "tf32") else "16-bit attention"


def _lookup(values: Mapping[str, float], *names: str) -> float:
    return next((values[name] for name in names if name in values), values[POOLED])


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file; DataMissingError if it is missing or none."""
    try:
        return Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError) as error:
        raise DataMissingError(
            f"{path} cannot be used: {error}",
            why="without a calibration every speed would be a guess",
            next_step="gpufleet calibrate RUNS.csv --out FILE writes one",
        ) from error


@functools.cache
def load() -> Calibration:
    """Read the shipped calibration."""
    return read_calibration(CALIBRATION)
