"""Measure a module: trace three batch sizes, draw lines through two, check them on the third, write the profile."""

from __future__ import annotations

import contextlib
import datetime as dt
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from optimizer.contract.errors import InvalidInputError
from optimizer.workload.profile.cuda_dispatch import as_on_cuda
from optimizer.workload.profile.passes import PassKey, TracedBatch, trace_batch
from optimizer.workload.profile.records import BatchLine, Blocks, ModuleProfile, OperatorFlops, ParameterCount, Pass
from optimizer.workload.profile.trace import Counts
from optimizer.workload.profile.user_code import import_function

SMALLEST_BATCH = 2
# Tolerance of the third batch: kernels pad some outputs (log-sum-exp to 32 rows).
LINEAR_WITHIN = 0.01
# Largest batch for which the peak keeps separate lines.
LARGEST_BATCH = 1 << 20


def profile_module(target: str, progress: Callable[[str], None] = lambda _: None) -> ModuleProfile:
    """Profile the module that ``target`` ("package.module:function") builds, and check it at four times the batch.

    Passes are in 16-bit arithmetic and, unless the module is stored in 16 bits, in 32-bit; each without activation
    checkpointing and, where the module has repeated blocks, with it. InvalidInputError where there is no such function,
    it or the module fails, or it breaks the contract.
    """
    function = import_function(target)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), as_on_cuda():  # user code prints no result
        # Copying a fake tensor asks where its data is (nn.TransformerEncoder copies its layer).
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        batches = {}
        for size in (SMALLEST_BATCH, 2 * SMALLEST_BATCH, 4 * SMALLEST_BATCH):
            progress(f"batch of {size}: building and tracing")
            batches[size] = trace_batch(target, function, size, only_plain=size == 4 * SMALLEST_BATCH)
    return _build_profile(target, batches)


def _build_profile(target: str, batches: Mapping[int, TracedBatch]) -> ModuleProfile:
    small, large, check = batches
    first = batches[small]
    module, blocks = first.module, first.blocks
    passes = [
        _build_pass(key, (small, large), (counts, batches[large].passes[key]), target)
        for key, counts in first.passes.items()
    ]
    for traced in passes:
        if (counts := batches[check].passes.get((traced.width, traced.checkpointing))) is not None:
            _check_linear(traced, counts, check, target)
    # Every module has this pass, and in 16 bits attention is fused: its FLOPs are halved under a causal mask.
    plain = first.passes["16-bit", "none"]
    sizes = [_size(block) for block in blocks]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = sum(p.numel() for p in module.parameters() if id(p) not in in_blocks)
    return ModuleProfile(
        name=target,
        module_class=type(module).__name__,
        parameters=_count_parameters(module),
        idle_parameters=plain.idle_parameters,
        buffer_bytes=sum(buffer.numel() * buffer.itemsize for buffer in module.buffers()),
        forward_flops=_per_sample(plain.flops["forward"], small),
        backward_flops=_per_sample(plain.flops["backward"], small),
        convolution_outputs=plain.convolution_outputs / small,
        blocks=Blocks(
            class_names=tuple(dict.fromkeys(type(block).__name__ for block in blocks)),
            count=len(blocks),
            largest_parameters=max(sizes),
        )
        if blocks
        else None,
        largest_unit_parameters=max([rest, *sizes]),
        passes=tuple(passes),
        uncounted_operators=tuple(sorted(plain.uncounted)),
        torch=torch.__version__,
        as_of=dt.datetime.now(dt.UTC).date(),
    )


def _build_pass(key: PassKey, sizes: tuple[int, int], counts: tuple[Counts, Counts], target: str) -> Pass:
    """Draw the lines of one pass over the batch size."""
    (b1, b2), (first, second) = sizes, counts
    if len(first.alive_bytes) != len(second.alive_bytes):
        raise InvalidInputError(
            f"{target} runs {len(first.alive_bytes)} operators on a batch of {b1}, {len(second.alive_bytes)} on {b2}",
            limit="the same operators whatever the batch",
            why="costs of a sample are the difference between two batches",
            next_step="leave out a loop over samples",
        )
    alive = np.array([first.alive_bytes, second.alive_bytes], dtype=np.float64)
    slopes = (alive[1] - alive[0]) / (b2 - b1)
    fixed = alive[0] - slopes * b1
    width, checkpointing = key
    return Pass(
        width=width,
        checkpointing=checkpointing,
        saved=_line(fixed[first.saved_index], slopes[first.saved_index]),
        peak=_upper_envelope(fixed, slopes),
        traffic=_line_through(b1, first.traffic_bytes, b2, second.traffic_bytes),
        product_elements=_line_through(b1, first.product_elements, b2, second.product_elements),
        flops=_per_sample(first.flops["forward"] + first.flops["backward"], b1),
        kernels=first.kernels,
    )


def _per_sample(flops: Mapping[str, int], size: int) -> OperatorFlops:
    return OperatorFlops(**{kind: value / size for kind, value in flops.items()})


def _line(fixed: float, slope: float) -> BatchLine:
    return BatchLine(fixed_bytes=max(0.0, float(fixed)), bytes_per_sample=max(0.0, float(slope)))


def _line_through(b1: int, at_b1: float, b2: int, at_b2: float) -> BatchLine:
    slope = (at_b2 - at_b1) / (b2 - b1)
    return _line(at_b1 - slope * b1, slope)


def _upper_envelope(fixed: Any, slopes: Any) -> tuple[BatchLine, ...]:
    """Upper envelope of the lines over batches from 1 to LARGEST_BATCH, flattest first."""
    envelope: list[BatchLine] = []
    batch = 1.0
    while batch < LARGEST_BATCH:
        values = fixed + slopes * batch
        top = int(np.lexsort((slopes, values))[-1])
        envelope.append(_line(fixed[top], slopes[top]))
        steeper = slopes > slopes[top] * (1 + 1e-9) + 1e-9
        if not steeper.any():
            break
        # Continue where the next steeper line crosses this one.
        crossings = (fixed[top] - fixed[steeper]) / (slopes[steeper] - slopes[top])
        batch = max(batch * (1 + 1e-9), float(crossings.min()))
    return tuple(envelope)


def _check_linear(traced: Pass, counts: Counts, size: int, target: str) -> None:
    """Check that the costs of the third batch are on the lines."""
    flops = counts.flops["forward"] + counts.flops["backward"]
    for name, unit, expected, got in (
        ("memory", "MB", traced.peak_bytes(size), max(counts.alive_bytes)),
        ("traffic", "MB", traced.traffic.evaluate(size), counts.traffic_bytes),
        ("arithmetic", "MFLOP", traced.flops.total * size, flops.total()),
    ):
        if abs(got - expected) > LINEAR_WITHIN * max(got, expected):
            raise InvalidInputError(
                f"the {name} of {target} is {got / 1e6:,.1f} {unit} for a batch of {size}",
                limit=f"{expected / 1e6:,.1f} {unit}, as half and a quarter of it give",
                why="costs are given for one sample, and here they do not grow with the batch alone",
                next_step="a loss that compares all samples of a batch with each other cannot be profiled",
            )


def _count_parameters(module: torch.nn.Module) -> tuple[ParameterCount, ...]:
    by_type: dict[torch.dtype, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        by_type[parameter.dtype].append(parameter)
    return tuple(
        ParameterCount(
            dtype=str(dtype).removeprefix("torch."),
            parameters=sum(parameter.numel() for parameter in group),
            trainable=sum(parameter.numel() for parameter in group if parameter.requires_grad),
            element_bytes=dtype.itemsize,
        )
        for dtype, group in by_type.items()
    )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
