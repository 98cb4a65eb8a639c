"""Estimate memory and step time of a whole grid of configurations at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from optimizer.performance import step
from optimizer.performance.calibration import Calibration
from optimizer.performance.compute import model_flops_per_sample
from optimizer.performance.inputs import Inputs, to_gib
from optimizer.performance.inputs_builder import build_inputs
from optimizer.performance.memory import CONTEXT_BYTES, FRAGMENTATION, margin, memory, needed_bytes
from optimizer.performance.types import Estimates, Floats, Grid, Hardware, Number, Recipe
from optimizer.workload.model import ModelSpec

# Configurations whose intermediate arrays stay in the processor's cache.
CHUNK = 8192


def evaluate(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, calibration: Calibration) -> Estimates:
    """Estimate every configuration of ``grid``, in the shape that its arrays broadcast to."""
    shape = np.broadcast_shapes(*(np.shape(getattr(grid, field.name)) for field in fields(Grid)))
    size = math.prod(shape)
    inputs = build_inputs(model, recipe, hardware, grid, calibration)
    if size <= CHUNK:
        return _estimate(inputs, shape)
    # Columns of one value stay so, to be computed once.
    arrays = {
        field.name: np.broadcast_to(column, shape).ravel()
        for field in fields(Grid)
        if (column := getattr(inputs, field.name)).size > 1
    }
    chunks = []
    for start in range(0, size, CHUNK):
        piece: dict[str, Any] = {name: array[start : start + CHUNK] for name, array in arrays.items()}
        chunks.append(_estimate(replace(inputs, **piece), (min(CHUNK, size - start),)))
    names = [field.name for field in fields(Estimates)]
    return Estimates(**{name: _join([getattr(chunk, name) for chunk in chunks], shape) for name in names})


def evaluate_inputs(inputs: Inputs) -> Estimates:
    """Estimate stacked Inputs."""
    return _estimate(inputs, np.shape(inputs.nodes))


def reserve_gib(estimates: Estimates) -> dict[str, Floats]:
    """GiB by part that the GPU must have beyond the peak."""
    return {
        "fragmentation": FRAGMENTATION * estimates.peak_memory_gib,
        "cuda_context": np.full_like(estimates.nccl_gib, to_gib(CONTEXT_BYTES)),
        "nccl": estimates.nccl_gib,
    }


def step_s(x: Inputs) -> Floats:
    """Compute ``Estimates.step_time_s`` alone."""
    return np.asarray(sum(step.step_seconds(x).values()), dtype=np.float64)


def needed_gib(x: Inputs) -> tuple[Floats, Floats]:
    """Compute ``Estimates.p95_memory_gib`` and ``nccl_gib`` alone; neither depends on the GPU."""
    peak, streams, nccl = needed_bytes(x)
    return np.asarray(to_gib(peak * (1.0 + margin(x)) + streams)), np.asarray(to_gib(nccl), dtype=np.float64)


def limit_gib(gpu_memory_bytes: Number, nccl_gib: Number) -> Floats:
    """Compute ``Estimates.limit_gib`` from the bytes that the driver shows."""
    available_gib = (to_gib(gpu_memory_bytes) - (to_gib(CONTEXT_BYTES) + nccl_gib)) / (1.0 + FRAGMENTATION)
    return np.asarray(np.maximum(available_gib, 0.0), dtype=np.float64)


def _estimate(x: Inputs, shape: tuple[int, ...]) -> Estimates:
    parts_s = step.step_seconds(x)
    total_s = np.asarray(sum(parts_s.values()), dtype=np.float64)
    held = memory(x)
    parts_gib = {name: to_gib(value) for name, value in held.peak.items()}
    peak_gib = np.asarray(sum(parts_gib.values()), dtype=np.float64)
    nccl_gib = to_gib(held.nccl)
    allowed_gib = limit_gib(x.gpu_memory_bytes, nccl_gib)
    samples = x.data * x.micro_batch * x.grad_accum
    gpus = x.data * x.tensor * x.pipeline * x.context
    mfu = samples * model_flops_per_sample(x) / total_s / (gpus * x.peak_flop_per_s)

    def full(value: Any) -> Any:
        return np.broadcast_to(value, shape)

    return Estimates(
        step_time_s=full(total_s),
        tokens_per_second=full(samples * x.seq_len / total_s),
        mfu=full(mfu),
        peak_memory_gib=full(peak_gib),
        p95_memory_gib=full(peak_gib * (1.0 + margin(x)) + to_gib(held.streams)),
        limit_gib=full(allowed_gib),
        nccl_gib=full(nccl_gib),
        fits=full(peak_gib <= allowed_gib),
        memory_gib={name: full(value) for name, value in parts_gib.items()},
        time_s={name: full(value) for name, value in parts_s.items()},
    )


def _join(chunks: Sequence[Any], shape: tuple[int, ...]) -> Any:
    if isinstance(chunks[0], dict):
        return {part: _join([chunk[part] for chunk in chunks], shape) for part in chunks[0]}
    return np.concatenate(chunks).reshape(shape)
