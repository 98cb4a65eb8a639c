"""Rules of the configurations that training code accepts.

From Megatron-LM (https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py,
megatron/training/arguments.py). Stages need not divide the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu, Precision
from optimizer.performance.frameworks import MEGATRON, TRAINER, frameworks
from optimizer.performance.types import Bools, Grid, Ints, Recipe
from optimizer.workload.model import ModelSpec

Codes = npt.NDArray[np.uint8]

# Architectures whose matrix units lack a precision (compute capability 7.0 and 7.5; 8.0 and 8.6):
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
WITHOUT: dict[Precision, tuple[str, ...]] = {
    "tf32": ("Volta", "Turing"),
    "bf16": ("Volta", "Turing"),
    "fp8": ("Volta", "Turing", "Ampere"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Settings that the rules compare."""

    data: Ints
    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    sequence_parallel: Ints
    virtual_stages: Ints
    micro_batch: Ints
    grad_accum: Ints
    seq_len: int
    trains_whole_layers: bool
    is_megatron: bool  # code with Megatron's fused kernels and its layouts


@dataclass(frozen=True, slots=True)
class Rule:
    """A setting, a check, values that would do, and the reason."""

    setting: str
    holds: Callable[[ModelSpec, Layout], Bools]
    limit: Callable[[ModelSpec, Layout], str]
    why: str


_COUNTS = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages", "micro_batch", "grad_accum")
_SPLITS = ("tensor", "pipeline", "context", "expert", "virtual_stages")
# Splits of models that DistributedDataParallel does not take.
_NOT_OF_DDP = ("tensor", "pipeline", "expert")


def _divisor(setting: str, field: str, name: str, why: str) -> Rule:
    return Rule(
        setting,
        lambda m, x: (getattr(m, field) % getattr(x, setting)) == 0,
        lambda m, x: f"a divisor of {getattr(m, field)}, the {name} of {m.name}",
        why,
    )


RULES: tuple[Rule, ...] = (
    *(
        Rule(name, lambda m, x, name=name: getattr(x, name) >= 1, lambda m, x: "at least 1", "it is a count")  # type: ignore[misc]
        for name in _COUNTS
    ),
    *(
        Rule(
            name,
            lambda m, x, name=name: (getattr(x, name) == 1) | m.has_like_layers,  # type: ignore[misc]
            lambda m, x: f"1: {m.name} is trained data-parallel",
            "only like layers over the same tokens are split, or staged",
        )
        for name in _SPLITS
    ),
    _divisor("tensor", "attention_heads", "attention heads", "tensor parallelism gives each rank whole heads"),
    Rule(
        "tensor",
        lambda m, x: (m.kv_heads % x.tensor == 0) | (x.is_megatron & (x.tensor % max(1, m.kv_heads) == 0)),
        lambda m, x: f"a divisor of {m.kv_heads}, the key-value heads of {m.name}",
        "tensor parallelism gives each rank whole key-value heads",
    ),
    _divisor(
        "tensor",
        "ffn_size",
        "feed-forward width",
        "tensor parallelism gives each rank an equal slice of the feed-forward block",
    ),
    Rule(
        "pipeline",
        lambda m, x: (x.pipeline == 1) | (x.pipeline <= m.layers),
        lambda m, x: f"{m.layers}, the layers of {m.name}",
        "each stage has at least one layer",
    ),
    Rule(
        "virtual_stages",
        # Megatron counts embedding and loss as layers (account_for_embedding_in_pipeline_split and _for_loss_).
        lambda m, x: (x.virtual_stages == 1) | (x.pipeline * x.virtual_stages <= m.layers + 2 * x.is_megatron),
        lambda m, x: f"{m.layers // int(x.pipeline)}: {m.layers} layers over {x.pipeline} stages",
        "each chunk of a stage has at least one layer",
    ),
    Rule(
        "virtual_stages",
        lambda m, x: (x.virtual_stages == 1) | (x.pipeline > 1),
        lambda m, x: "1 without pipeline parallelism",
        "chunks interleave the stages of a pipeline",
    ),
    Rule(
        "grad_accum",
        # Megatron's groups may be other than the stages (microbatch_group_size_per_vp_stage).
        lambda m, x: (x.virtual_stages == 1) | (x.grad_accum % np.where(x.is_megatron, 1, x.pipeline) == 0),
        lambda m, x: f"a multiple of {x.pipeline}, the pipeline stages",
        "the interleaved schedule runs micro-batches in groups of as many as there are stages (arXiv:2104.04473, 2.2)",
    ),
    Rule(
        "context",
        lambda m, x: (x.context == 1) | (x.seq_len % (2 * x.context) == 0),
        lambda m, x: f"a divisor of {x.seq_len / 2:g}, half the tokens of a sequence",
        "each context rank takes two equal chunks of a sequence, so that a causal mask loads all alike",
    ),
    Rule(
        "sequence_parallel",
        lambda m, x: (x.sequence_parallel == 0) | (x.seq_len % (x.tensor * x.context) == 0),
        lambda m, x: (
            f"off: {x.seq_len} tokens of a sequence are no multiple of tensor {x.tensor} x context {x.context}"
        ),
        "each tensor rank takes an equal part of the sequence",
    ),
    Rule(
        "expert",
        lambda m, x: (x.expert == 1) | (not m.has_like_layers) | (m.experts > 0),
        lambda m, x: f"1: {m.name} has no experts",
        "expert parallelism spreads the experts of a mixture",
    ),
    _divisor("expert", "experts", "experts", "each rank holds as many experts"),
    Rule(
        "expert",
        lambda m, x: (np.where(x.is_megatron, x.data * x.context * x.tensor, x.data) % x.expert) == 0,
        lambda m, x: f"a divisor of {x.data}, the data-parallel ranks",
        "a group of data-parallel ranks shares the experts; in Megatron's code context and tensor ranks join it",
    ),
    Rule(
        "sequence_parallel",
        lambda m, x: (x.expert == 1) | (x.tensor == 1) | (x.sequence_parallel > 0),
        lambda m, x: f"on: expert parallelism is {x.expert} and tensor parallelism {x.tensor}",
        "tensor ranks would send the same tokens to the experts once each (Megatron-LM refuses it too)",
    ),
    *(
        Rule(
            name,
            lambda m, x, name=name: (getattr(x, name) == 1) | x.trains_whole_layers,  # type: ignore[misc]
            lambda m, x: "1 where a part of the model trains",
            "frozen layers, 4-bit weights and the reference trainer's adapters are not split",
        )
        for name in _NOT_OF_DDP
    ),
)


def legal(model: ModelSpec, recipe: Recipe, grid: Grid) -> tuple[Bools, Codes]:
    """Flag legal configurations, and code the others: 1 + the first broken rule's position in RULES."""
    layout = _layout(recipe, grid)
    shape = np.broadcast_shapes(*(np.shape(getattr(layout, name)) for name in (*_COUNTS, "sequence_parallel")))
    codes: Codes = np.zeros(shape, dtype=np.uint8)
    with np.errstate(divide="ignore"):  # a rule of its own refuses a count of 0
        for number, rule in reversed(list(enumerate(RULES, start=1))):
            holds = np.asarray(rule.holds(model, layout))
            if not holds.all():
                codes[np.broadcast_to(~holds, shape)] = number
    return codes == 0, codes


def check_legal(model: ModelSpec, recipe: Recipe, grid: Grid) -> None:
    """Refuse an illegal configuration."""
    _, code = legal(model, recipe, grid)
    if code:
        raise refusal(model, recipe, grid, RULES[int(code) - 1])


def check_precision(gpu: Gpu, precision: Precision) -> None:
    """Refuse a precision that a GPU does not compute in."""
    if gpu.architecture in WITHOUT.get(precision, ()):
        raise InvalidInputError(
            f"{gpu.name} does not compute in {precision}",
            limit=f"it does in {', '.join(name for name, peak in gpu.peak_tflop_per_s.items() if peak)}",
            why=f"{gpu.architecture} has no such matrix units",
            next_step="choose another --precision or GPU",
        )


def refusal(model: ModelSpec, recipe: Recipe, grid: Grid, rule: Rule) -> InvalidInputError:
    """Build the error of a configuration that breaks ``rule``."""
    layout = _layout(recipe, grid)
    value = getattr(layout, rule.setting)
    return InvalidInputError(f"{rule.setting} is {value}", limit=rule.limit(model, layout), why=rule.why)


def splits_adapters(recipe: Recipe) -> bool:
    """Tell if tensor ranks and pipeline stages split the base and its adapters."""
    return recipe.tuning.adapts and not recipe.tuning.four_bit and recipe.framework != TRAINER


def _layout(recipe: Recipe, grid: Grid) -> Layout:
    split = grid.sequence_parallel
    if split is None:
        split = frameworks()[recipe.framework].splits_sequence
    settings = {name: np.asarray(getattr(grid, name)).astype(np.int64) for name in _COUNTS}
    tensor = settings["tensor"]
    return Layout(
        **settings,
        sequence_parallel=np.where(tensor > 1, split, 0).astype(np.int64),
        seq_len=recipe.seq_len,
        is_megatron=recipe.framework in MEGATRON,
        trains_whole_layers=recipe.tuning.trains_all or splits_adapters(recipe),
    )
