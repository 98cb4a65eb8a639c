"""Estimate memory and step time of a whole grid of configurations at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance.calibration import Calibration, Coefficients
from optimizer.performance.case import Case, build_case
from optimizer.performance.memory import CONTEXT_BYTES, FRAGMENTATION, limit_bytes, memory
from optimizer.performance.operations import model_flops_per_sample
from optimizer.performance.table import build_table, step_seconds
from optimizer.performance.types import Estimates, Floats, Grid, Hardware, Number, Recipe
from optimizer.workload.model import ModelSpec

# Configurations whose intermediate arrays stay in the processor's cache.
CHUNK = 8192


def evaluate(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, calibration: Calibration) -> Estimates:
    """Estimate every configuration of ``grid``, in the shape that its arrays broadcast to."""
    case = build_case(model, recipe, hardware, grid)
    coefficients = calibration.coefficients(hardware.gpu, case.recipe)
    names = [field.name for field in fields(Grid)]
    shape = np.broadcast_shapes(*(np.shape(getattr(case, name)) for name in names))
    size = math.prod(shape)
    if size <= CHUNK:
        return estimate_case(case, coefficients)
    # Columns of one value stay so, to be computed once.
    arrays: dict[str, Any] = {
        name: np.broadcast_to(column, shape).ravel() for name in names if np.size(column := getattr(case, name)) > 1
    }
    pieces = ({name: array[start : start + CHUNK] for name, array in arrays.items()} for start in range(0, size, CHUNK))
    chunks = [estimate_case(replace(case, **piece), coefficients) for piece in pieces]
    return join_estimates(chunks, shape)


def estimate_case(x: Case, coefficients: Coefficients) -> Estimates:
    """Estimate every layout of a case, in the shape that its columns broadcast to."""
    shape = np.broadcast_shapes(*(np.shape(getattr(x, field.name)) for field in fields(Grid)))
    parts_s = step_seconds(build_table(x), coefficients)
    total_s = np.asarray(sum(parts_s.values()), dtype=np.float64)
    held = memory(x)
    peak_gib, allowed_gib = held.peak / GIB, limit_bytes(x.rates.gpu_memory_bytes, held.nccl) / GIB
    samples = x.data * x.micro_batch * x.grad_accum
    gpus = x.ranks * x.tensor * x.pipeline

    def full(value: Any) -> Any:
        return np.broadcast_to(value, shape)

    return Estimates(
        step_time_s=full(total_s),
        tokens_per_second=full(samples * x.recipe.seq_len / total_s),
        mfu=full(samples * model_flops_per_sample(x) / total_s / (gpus * x.rates.peak)),
        peak_memory_gib=full(peak_gib),
        p95_memory_gib=full(held.p95 / GIB),
        limit_gib=full(allowed_gib),
        nccl_gib=full(held.nccl / GIB),
        fits=full(peak_gib <= allowed_gib),
        memory_gib={name: full(value / GIB) for name, value in held.parts.items()},
        time_s={name: full(value) for name, value in parts_s.items()},
    )


def reserve_gib(estimates: Estimates) -> dict[str, Floats]:
    """GiB by part that the GPU must have beyond the peak."""
    return {
        "fragmentation": FRAGMENTATION * estimates.peak_memory_gib,
        "cuda_context": np.full_like(estimates.nccl_gib, CONTEXT_BYTES / GIB),
        "nccl": estimates.nccl_gib,
    }


def step_s(x: Case, coefficients: Coefficients) -> Floats:
    """Compute ``Estimates.step_time_s`` alone."""
    return np.asarray(sum(step_seconds(build_table(x), coefficients).values()), dtype=np.float64)


def needed_gib(x: Case) -> tuple[Floats, Floats]:
    """Compute ``Estimates.p95_memory_gib`` and ``nccl_gib`` alone; neither depends on the GPU."""
    held = memory(x)
    return np.asarray(held.p95 / GIB), np.asarray(held.nccl / GIB, dtype=np.float64)


def limit_gib(gpu_memory_bytes: Number, nccl_gib: Number) -> Floats:
    """Compute ``Estimates.limit_gib`` from the bytes that the driver shows."""
    return np.asarray(limit_bytes(gpu_memory_bytes, nccl_gib * GIB) / GIB, dtype=np.float64)


def join_estimates(estimates: Sequence[Estimates], shape: tuple[int, ...]) -> Estimates:
    """Join estimates one after the other."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {part: join([value[part] for value in values]) for part in values[0]}
        return np.concatenate([np.ravel(value) for value in values]).reshape(shape)

    return Estimates(
        **{field.name: join([getattr(part, field.name) for part in estimates]) for field in fields(Estimates)}
    )
