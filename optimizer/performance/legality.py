"""Rules of the configurations that training code accepts.

From Megatron-LM (https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py,
megatron/training/arguments.py). Stages need not divide the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu, Precision
from optimizer.performance.frameworks import MEGATRON, TRAINER, frameworks
from optimizer.performance.types import Bools, Grid, Ints, Recipe
from optimizer.workload.model import ModelSpec

# Architectures whose matrix units lack a precision (compute capability 7.0 and 7.5; 8.0 and 8.6):
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
WITHOUT: dict[Precision, tuple[str, ...]] = {
    "tf32": ("Volta", "Turing"),
    "bf16": ("Volta", "Turing"),
    "fp8": ("Volta", "Turing", "Ampere"),
}

# A setting, where it is legal, a text of the values that would do, and the reason.
Rule = tuple[str, Any, Callable[[], str], str]

_COUNTS = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages", "micro_batch", "grad_accum")


def _rules(m: ModelSpec, recipe: Recipe, x: dict[str, Ints]) -> Iterator[Rule]:
    is_megatron = recipe.framework in MEGATRON
    data, tensor, pipeline, context, expert, chunks, _, grad_accum, sequence_parallel = x.values()

    def divides(name: str, field: str, words: str, why: str, copied: Any = False) -> Rule:
        total = getattr(m, field)
        return name, (total % x[name] == 0) | copied, lambda: f"a divisor of {total}, the {words} of {m.name}", why

    for name in _COUNTS:
        yield name, x[name] >= 1, lambda: "at least 1", "it is a count"
    if not m.has_like_layers:
        for name in ("tensor", "pipeline", "context", "expert", "virtual_stages"):
            why = "only like layers over the same tokens are split, or staged"
            yield name, x[name] == 1, lambda: f"1: {m.name} is trained data-parallel", why
    yield divides("tensor", "attention_heads", "attention heads", "tensor parallelism gives each rank whole heads")
    copies_heads = is_megatron & (tensor % max(1, m.kv_heads) == 0)
    yield divides("tensor", "kv_heads", "key-value heads", "tensor ranks have whole ones", copies_heads)
    yield divides("tensor", "ffn_size", "feed-forward width", "each tensor rank has an equal slice of it")
    yield from _stage_rules(m, is_megatron, pipeline, chunks, grad_accum)
    yield (
        "context",
        (context == 1) | (recipe.seq_len % (2 * context) == 0),
        lambda: f"a divisor of {recipe.seq_len / 2:g}, half the tokens of a sequence",
        "each context rank takes two equal chunks of a sequence, so that a causal mask loads all alike",
    )
    yield (
        "sequence_parallel",
        (sequence_parallel == 0) | (recipe.seq_len % (tensor * context) == 0),
        lambda: f"off: {recipe.seq_len} tokens of a sequence are no multiple of tensor {tensor} x context {context}",
        "each tensor rank takes an equal part of the sequence",
    )
    if m.has_like_layers and not m.experts:
        yield "expert", expert == 1, lambda: f"1: {m.name} has no experts", "expert ranks spread a mixture's experts"
    yield divides("expert", "experts", "experts", "each rank holds as many experts")
    yield (
        "expert",
        (data * context * tensor if is_megatron else data) % expert == 0,
        lambda: f"a divisor of {data}, the data-parallel ranks",
        "a group of data-parallel ranks shares the experts; in Megatron's code context and tensor ranks join it",
    )
    yield (
        "sequence_parallel",
        (expert == 1) | (tensor == 1) | (sequence_parallel > 0),
        lambda: f"on: expert parallelism is {expert} and tensor parallelism {tensor}",
        "tensor ranks would send the same tokens to the experts once each (Megatron-LM refuses it too)",
    )
    splits_adapters = recipe.tuning.adapts and not recipe.tuning.four_bit and recipe.framework != TRAINER
    if not (recipe.tuning.trains_all or splits_adapters):
        for name in ("tensor", "pipeline", "expert"):
            why = "frozen layers, 4-bit weights and the reference trainer's adapters are not split"
            yield name, x[name] == 1, lambda: "1 where a part of the model trains", why


def _stage_rules(m: ModelSpec, is_megatron: bool, pipeline: Ints, chunks: Ints, grad_accum: Ints) -> Iterator[Rule]:
    yield (
        "pipeline", (pipeline == 1) | (pipeline <= m.layers), lambda: f"{m.layers}, the layers of {m.name}",
        "each stage has at least one layer",
    )  # fmt: skip
    yield (
        "virtual_stages",
        # Megatron counts embedding and loss as layers (account_for_embedding_in_pipeline_split and _for_loss_).
        (chunks == 1) | (pipeline * chunks <= m.layers + 2 * is_megatron),
        lambda: f"{m.layers // int(pipeline)}: {m.layers} layers over {pipeline} stages",
        "each chunk of a stage has at least one layer",
    )
    yield (
        "virtual_stages", (chunks == 1) | (pipeline > 1), lambda: "1 without pipeline parallelism",
        "chunks interleave the stages of a pipeline",
    )  # fmt: skip
    yield (
        "grad_accum",
        # Megatron's groups may be other than the stages (microbatch_group_size_per_vp_stage).
        (chunks == 1) | is_megatron | (grad_accum % pipeline == 0),
        lambda: f"a multiple of {pipeline}, the pipeline stages",
        "the interleaved schedule runs micro-batches in groups of as many as there are stages (arXiv:2104.04473, 2.2)",
    )


def legal(model: ModelSpec, recipe: Recipe, grid: Grid) -> Bools:
    """Flag legal configurations."""
    with np.errstate(divide="ignore"):  # a rule of its own refuses a count of 0
        holds = (holds for _, holds, _, _ in _rules(model, recipe, _layout(recipe, grid)))
        return np.asarray(functools.reduce(np.logical_and, holds))


def check_legal(model: ModelSpec, recipe: Recipe, grid: Grid) -> None:
    """Refuse an illegal configuration by the first rule that it breaks."""
    layout = _layout(recipe, grid)
    with np.errstate(divide="ignore"):
        for name, holds, limit, why in _rules(model, recipe, layout):
            if not holds:
                raise InvalidInputError(f"{name} is {layout[name]}", limit=limit(), why=why)


def check_precision(gpu: Gpu, precision: Precision) -> None:
    """Refuse a precision that a GPU does not compute in."""
    if gpu.architecture in WITHOUT.get(precision, ()):
        raise InvalidInputError(
            f"{gpu.name} does not compute in {precision}",
            limit=f"it does in {', '.join(name for name, peak in gpu.peak_tflop_per_s.items() if peak)}",
            why=f"{gpu.architecture} has no such matrix units",
            next_step="choose another --precision or GPU",
        )


def _layout(recipe: Recipe, grid: Grid) -> dict[str, Ints]:
    layout = {name: np.asarray(getattr(grid, name)).astype(np.int64) for name in _COUNTS}
    split = grid.sequence_parallel
    if split is None:
        split = frameworks()[recipe.framework].splits_sequence
    layout["sequence_parallel"] = np.where(layout["tensor"] > 1, split, 0).astype(np.int64)
    return layout
