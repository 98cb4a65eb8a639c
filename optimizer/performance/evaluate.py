"""Estimates of memory and step time for a whole grid of configurations at once; the scalar case is a grid of one."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from optimizer.performance import step
from optimizer.performance.calibration import Calibration
from optimizer.performance.communication import link_of, network_of
from optimizer.performance.compute import model_flops_per_sample
from optimizer.performance.frameworks import framework_name
from optimizer.performance.inputs import Inputs, Number, grid_shape, make_inputs, to_gib
from optimizer.performance.memory import CONTEXT_BYTES, FRAGMENTATION, memory, needed_bytes
from optimizer.performance.types import Estimates, Floats, Grid, Hardware, Recipe
from optimizer.workload.model import ModelSpec

# Configurations evaluated together: intermediate arrays of this length stay in the processor's cache.
CHUNK = 8192


def inputs_of(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, calibration: Calibration) -> Inputs:
    """Everything ``evaluate`` is given, in numbers; raises as it does."""
    recipe = replace(recipe, framework=framework_name(recipe.framework, cnn=model.convolutional))
    coefficients = calibration.coefficients(hardware.gpu, recipe)
    return make_inputs(model, recipe, hardware, grid, coefficients, link_of(hardware), network_of(hardware))


def evaluate(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, calibration: Calibration) -> Estimates:
    """Estimate every configuration of ``grid``.

    Args:
        model: what is trained.
        recipe: what stays the same over the grid.
        hardware: the node type.
        grid: configurations, arrays that broadcast against each other.
        calibration: fitted numbers (``calibration.load()``).

    Returns:
        Estimates of the shape the grid's arrays broadcast to.

    Raises:
        DataMissingError: the GPU does not run the precision, or a fact about it is missing.
        InvalidInputError: a number or word of ``recipe`` is out of range.
    """
    shape = grid_shape(grid)
    size = math.prod(shape)
    everything = inputs_of(model, recipe, hardware, grid, calibration)
    if size <= CHUNK:
        return _estimates(everything, shape)
    # Numbers stay numbers: what depends on them alone is then worked out once, not for every configuration.
    arrays = {
        f.name: np.broadcast_to(value, shape).ravel()
        for f in fields(Grid)
        if (value := getattr(everything, f.name)).size > 1
    }
    whole: dict[str, Any] = {}
    for at in range(0, size, CHUNK):
        piece: dict[str, Any] = {name: array[at : at + CHUNK] for name, array in arrays.items()}
        found = _estimates(replace(everything, **piece), (min(CHUNK, size - at),))
        for f in fields(Estimates):
            _put(whole, f.name, getattr(found, f.name), slice(at, at + CHUNK), size)
    return Estimates(**{name: _shaped(value, shape) for name, value in whole.items()})


def estimate(
    model: ModelSpec,
    recipe: Recipe,
    hardware: Hardware,
    calibration: Calibration,
    *,
    nodes: int,
    data: int,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    sequence_parallel: int | None = None,
    virtual_stages: float = 1,
    sharding: int,
    micro_batch: int,
    grad_accum: int = 1,
    checkpointing: int = 0,
) -> Estimates:
    """Estimate one configuration; arguments are those of Grid, results are arrays of shape ()."""
    grid = Grid(
        nodes=nodes,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        sequence_parallel=sequence_parallel,
        virtual_stages=virtual_stages,
        sharding=sharding,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        checkpointing=checkpointing,
    )
    return evaluate(model, recipe, hardware, grid, calibration)


def evaluate_inputs(inputs: Inputs) -> Estimates:
    """Estimate Inputs made by ``stack``: one model, GPU and configuration a row."""
    return _estimates(inputs, np.shape(inputs.nodes))


def reserve_gib(found: Estimates) -> dict[str, Floats]:
    """GiB by part that the GPU must have beyond the peak: fragmentation of the allocator, CUDA's context, NCCL."""
    context: Floats = np.full_like(found.nccl_gib, to_gib(CONTEXT_BYTES))
    return {"fragmentation": FRAGMENTATION * found.peak_memory_gib, "cuda_context": context, "nccl": found.nccl_gib}


def step_s(x: Inputs) -> Floats:
    """Seconds of one optimizer step: ``Estimates.step_time_s`` alone, of the shape its arrays broadcast to."""
    return np.asarray(sum(step.step_seconds(x).values()), dtype=np.float64)


def needed_gib(x: Inputs) -> tuple[Floats, Floats]:
    """``Estimates.peak_memory_gib`` and ``nccl_gib`` alone; what the GPU is makes no difference to them."""
    peak, nccl = needed_bytes(x)
    return np.asarray(to_gib(peak), dtype=np.float64), np.asarray(to_gib(nccl), dtype=np.float64)


def room_gib(x: Inputs) -> tuple[Floats, Floats]:
    """``Estimates.peak_memory_gib`` and ``limit_gib`` alone."""
    peak_gib, nccl_gib = needed_gib(x)
    return peak_gib, limit_gib(x.gpu_memory_bytes, nccl_gib)


def limit_gib(gpu_memory_bytes: Number, nccl_gib: Number) -> Floats:
    """``Estimates.limit_gib`` of GPUs whose driver shows so many bytes."""
    available_gib = (to_gib(gpu_memory_bytes) - (to_gib(CONTEXT_BYTES) + nccl_gib)) / (1.0 + FRAGMENTATION)
    return np.asarray(np.maximum(available_gib, 0.0), dtype=np.float64)


def _estimates(x: Inputs, shape: tuple[int, ...]) -> Estimates:
    parts_s = step.step_seconds(x)
    total_s = np.asarray(sum(parts_s.values()), dtype=np.float64)
    held = memory(x)
    parts_gib = {name: to_gib(value) for name, value in held.peak.items()}
    peak_gib = np.asarray(sum(parts_gib.values()), dtype=np.float64)
    nccl_gib = to_gib(held.nccl)
    most_gib = limit_gib(x.gpu_memory_bytes, nccl_gib)
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
        limit_gib=full(most_gib),
        nccl_gib=full(nccl_gib),
        fits=full(peak_gib <= most_gib),
        memory_gib={name: full(value) for name, value in parts_gib.items()},
        time_s={name: full(value) for name, value in parts_s.items()},
    )


def _put(whole: dict[str, Any], name: str, value: Any, place: slice, size: int) -> None:
    """Write one chunk's ``value``, an array or a mapping of arrays, into ``whole[name]``, arrays of ``size``.

    What is one number in every chunk so far (an array without strides) stays one.
    """
    if isinstance(value, dict):
        parts = whole.setdefault(name, {})
        for part, array in value.items():
            _put(parts, part, array, place, size)
        return
    if value.strides == (0,):
        number = value[0]
        if place.start == 0:
            whole[name] = number
            return
        if not isinstance(whole[name], np.ndarray) and whole[name] == number:
            return
    if place.start == 0 or not isinstance(whole[name], np.ndarray):
        whole[name] = np.full(size, whole[name]) if name in whole else np.empty(size, dtype=value.dtype)
    whole[name][place] = value


def _shaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, dict):
        return {name: _shaped(part, shape) for name, part in value.items()}
    return value.reshape(shape) if isinstance(value, np.ndarray) else np.broadcast_to(value, shape)
