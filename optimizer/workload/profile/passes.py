"""Trace the passes of one batch size: build the module from fake tensors, run forward and backward, and count."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from optimizer.contract.errors import InvalidInputError
from optimizer.workload.profile.cuda_dispatch import fake_tensors
from optimizer.workload.profile.records import ArithmeticWidth, ProfiledCheckpointing
from optimizer.workload.profile.trace import Counts, OperationTrace
from optimizer.workload.profile.user_code import TrainingStep, blame_user_code, check_step, find_loss

PassKey = tuple[ArithmeticWidth, ProfiledCheckpointing]


@dataclass(frozen=True, kw_only=True)
class TracedBatch:
    """The module built for one batch size, and its passes."""

    module: torch.nn.Module
    blocks: Sequence[torch.nn.Module]
    passes: Mapping[PassKey, Counts]


def trace_batch(target: str, function: Callable[[int], Any], size: int, *, only_plain: bool) -> TracedBatch:
    """Build the module for one batch size and trace every pass, or the first only."""
    trace = OperationTrace()
    with fake_tensors(), trace:
        with blame_user_code(f"{target}({size}) failed"):
            returned = function(size)
        step = check_step(returned, target, size)
        module = step.module.train()
        for tensor in [*module.parameters(), *module.buffers()]:
            trace.leave_out(tensor)
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(lambda p: trace.leave_out(p.grad))
        blocks = find_blocks(module)
        widths = _widths(module, target)
        passes: dict[PassKey, Counts] = {}
        for width in widths[:1] if only_plain else widths:
            passes[width, "none"] = _trace_pass(step, trace, width, target)
        if blocks and not only_plain:
            _checkpoint_blocks(blocks)
            for width in widths:
                passes[width, "full"] = _trace_pass(step, trace, width, target)
    return TracedBatch(module=module, blocks=blocks, passes=passes)


def _widths(module: torch.nn.Module, target: str) -> tuple[ArithmeticWidth, ...]:
    floating = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    known = {torch.float32, torch.float16, torch.bfloat16}
    if unknown := {p.dtype for p in module.parameters() if p.requires_grad} - known:
        raise InvalidInputError(
            f"{target} has trainable parameters of {', '.join(sorted(map(str, unknown)))}",
            limit="float32, bfloat16 or float16",
            why="the GPU table has no peak of another type",
            next_step="convert the module: .float(), .bfloat16() or .half()",
        )
    return ("16-bit",) if floating & {torch.float16, torch.bfloat16} else ("16-bit", "32-bit")


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the repeated blocks: children of one class, with submodules, of which a container holds several.

    Containers are searched recursively, blocks are not: a block is recomputed whole.
    """
    plain = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
    blocks: list[torch.nn.Module] = []

    def search(parent: torch.nn.Module) -> None:
        children = [child for child in parent.children() if any(True for _ in child.parameters())]
        classes = [type(child) for child in children]
        for child in children:
            has_parts = type(child) not in plain and any(True for _ in child.children())
            if isinstance(parent, plain) and has_parts and classes.count(type(child)) > 1:
                blocks.append(child)
            else:
                search(child)

    search(module)
    return blocks


def _checkpoint_blocks(blocks: Sequence[torch.nn.Module]) -> None:
    """Make each block keep only its inputs and recompute the rest."""

    def recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:  # a transformers cache would be appended to twice; transformers drops it too
            kwargs["past_key_values"] = None
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = functools.partial(recompute, block.forward)


def _trace_pass(step: TrainingStep, trace: OperationTrace, width: ArithmeticWidth, target: str) -> Counts:
    step.module.zero_grad(set_to_none=True)
    gc.collect()
    gc.disable()  # a collection in one pass only would move the peak
    try:
        trace.start()
        # fp16 is as wide as bf16: one pass stands for both. A module stored in 16 bits needs no autocast.
        casts = width == "16-bit" and any(p.dtype == torch.float32 for p in step.module.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            with blame_user_code(f"the module of {target} fails on its inputs"):
                output = step.module(*step.args, **step.kwargs)
            with blame_user_code(f"the loss of {target} fails"):
                loss = find_loss(output, step.loss, target)
        del output  # `loss = model(batch).loss` keeps no logits
        trace.start_backward()
        with blame_user_code(f"the backward pass of {target} fails"):
            torch.autograd.backward(loss)
        del loss
    finally:
        gc.enable()
    return trace.counts
