"""Share of the model on the fullest rank (layers, parameters, tokens), and its precision."""

from __future__ import annotations

import functools

import numpy as np

from optimizer.performance.inputs import Inputs
from optimizer.performance.stacks import USUAL_SUBLAYERS
from optimizer.performance.types import ZERO1, Flag, Number


def updated_parameters(x: Inputs) -> Number:
    """Parameters that the fullest rank's optimizer updates."""
    return np.where(x.sharding >= ZERO1, unshared_stage_parameters(x) / (x.data * x.context), stage_parameters(x))


@functools.lru_cache(maxsize=1)
def stage_parameters(x: Inputs) -> Number:
    """Parameters of the fullest rank's stage, tensor slice and experts, before sharding over data ranks.

    The fullest stage has one table: the first the embedding, the last the output projection.
    """
    return _stage_parameters(x, x.expert)


def unshared_stage_parameters(x: Inputs) -> Number:
    """Parameters of the fullest stage and tensor slice with all experts."""
    return _stage_parameters(x, 1.0)


def _stage_parameters(x: Inputs, expert: Number) -> Number:
    tables = x.vocab * x.hidden
    # The first stage has the positions too.
    first = np.where(x.embedding_parameters >= 2.0 * tables, x.embedding_parameters - tables, x.embedding_parameters)
    table = np.where(x.pipeline > 1, first, x.embedding_parameters)
    # The fullest stage has as few of a mixture's dense layers as can be.
    dense = np.where(x.experts > 0, layers_of_stage(x) - mixture_layers_of_stage(x), 0.0)
    layers = (layers_of_stage(x) - dense) * layer_parameters(x, expert) + dense * x.dense_layer_parameters
    return (layers + table) / x.tensor


def layers_of_stage(x: Inputs) -> Number:
    """Layers of the fullest pipeline stage."""
    head = x.balances_stages * (x.pipeline > 1) * head_layers(x)
    return np.minimum(np.ceil((x.layers + head) / x.pipeline), x.layers)


def layers_of_last_stage(x: Inputs) -> Number:
    """Layers of the stage with the output projection."""
    fullest = layers_of_stage(x)
    balanced = np.clip(np.floor(fullest - head_layers(x)), 0.0, None)
    return np.where((x.balances_stages > 0) & (x.pipeline > 1), balanced, fullest)


def head_layers(x: Inputs) -> Number:
    """Output projection's parameters over a layer's, the weight that balanced stages count."""
    return x.vocab * x.hidden / np.maximum(x.layer_matrix, 1.0)


def mixture_layers_of_stage(x: Inputs) -> Number:
    """Layers with experts of the fullest pipeline stage."""
    return np.minimum(layers_of_stage(x), x.mixture_layers)


def layer_parameters_of_rank(x: Inputs) -> Number:
    """Parameters of the largest unit that ZeRO gathers: a layer, or a larger embedding."""
    table = np.minimum(x.vocab * x.hidden, x.embedding_parameters)
    return np.maximum(layer_parameters(x, x.expert), table) / x.tensor


def layer_parameters(x: Inputs, expert: Number) -> Number:
    """Parameters of one layer whose experts ``expert`` ranks share, before tensor slicing; not of a dense layer."""
    return x.layer_parameters - x.expert_parameters * (1.0 - 1.0 / expert)


def tokens_of_rank(x: Inputs) -> Number:
    """Tokens of one micro-batch on one rank."""
    return x.micro_batch * x.tokens / x.context


def experts_in_32_bits(x: Inputs) -> Flag:
    """Flag mixtures whose products run in 32 bits under a 16-bit recipe.

    Autocast skips torch's grouped product (https://github.com/pytorch/pytorch/issues/174763; transformers 5.23,
    integrations/moe.py, _grouped_mm).
    """
    return experts_miss_autocast(x) & np.logical_not(computes_narrow(x))


def experts_miss_autocast(x: Inputs) -> Flag:
    """Flag mixtures whose grouped product computes in the weights' 32 bits unless FSDP gathers 16."""
    return (x.autocast > 0) & (x.grouped_experts > 0) & (x.experts > 0)


def grouped_in_32_bits(x: Inputs) -> Flag:
    """Flag 32-bit grouped queries in PyTorch, which have no fused attention; not means of unlike layers."""
    return (x.written_out > 0) & (x.element_bytes > 2.0) & (x.kv < x.query) & (x.sublayers <= USUAL_SUBLAYERS)


def scores_by_compiler(x: Inputs) -> Flag:
    """Flag compiled non-causal attention with mask and dropout, which has no fused kernel."""
    return (x.masks_compiled > 0) & (x.written_out > 0) & (x.compiled > 0) & (x.causal == 0) & (x.dropout > 0)


def masks_windows(x: Inputs) -> Flag:
    """Flag sliding windows that PyTorch's attention gets as a mask: it computes all scores, and keeps the mask."""
    return (x.written_out > 0) & (x.windowed > 0) & (x.flash > 0)


def computes_narrow(x: Inputs) -> Flag:
    """Flag Hugging Face's modules under FSDP2 or the trainer's tensor parallelism: 16 bits throughout, no autocast."""
    return (x.written_out > 0) & (shards_by_fsdp2(x) | ((x.splits_logits > 0) & (x.tensor > 1)))


def shards_by_fsdp2(x: Inputs) -> Flag:
    """Flag states that torch's ``fully_shard`` shards."""
    return (x.fsdp2 > 0) & (x.sharding >= x.fsdp2) & (x.data * x.context > 1)


def residual_bytes(x: Inputs) -> Number:
    """Bytes of an element of the residual, which is as narrow as products where nothing is under autocast."""
    return np.where(computes_narrow(x), np.minimum(x.element_bytes, x.residual_bytes), x.residual_bytes)
