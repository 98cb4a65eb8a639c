"""Costs of fine-tuning: a base without gradients, adapters, 4-bit weights, frozen layers, pure 16-bit training.

Counted from peft 0.21 (tuners/lora/layer.py, Linear.forward) and bitsandbytes 0.50 (nn/modules.py, functional.py,
optim/optimizer.py), LoRA (arXiv:2106.09685) and QLoRA (arXiv:2305.14314). 18 runs on one H100 judge them
(tests/benchmarks/results/finetuning_h100_202611.md); other GPUs have the error of ``search/confidence.py``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bootstrap.contract.fine_tuning import EIGHT_BIT, FULL_TRAINING, FineTuning
from optimizer.contract.errors import InvalidInputError
from optimizer.performance import kernels
from optimizer.performance.inputs import Inputs
from optimizer.performance.types import Number, Recipe
from optimizer.workload.model import ModelSpec

# Bytes of a weight in NF4 with double quantisation (QLoRA, section 3): half a byte, one byte of scale for 64 weights,
# and 4 bytes of its scale for 256 of those.
NF4_BYTES = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)
# Adapters over a 16-bit base are in 32 bits (peft, get_peft_model, autocast_adapter_dtype).
ADAPTER_BYTES = 4.0

# Bytes a token moves at an adapter's wide sides, in units of an element. Forward: the product with A reads the input;
# that with B writes its output, which is scaled (read, written) and added to the base's (two reads, a write). Backward:
# the gradient is scaled (read, written) and read by two products; the product with A writes the input's gradient, which
# is added to the base's (two reads, a write), and its weight gradient reads the input.
ADAPTER_INPUT = (1.0, 5.0)
ADAPTER_OUTPUT = (6.0, 4.0)
# Kernels of one adapter forward and backward: two products, scaling, sum; four products, scaling, sum. Of one 4-bit
# weight: its scales, their offset, the weights.
ADAPTER_KERNELS = (4.0, 6.0)
FOUR_BIT_KERNELS = 3.0
# Share of the memory bandwidth at which 4-bit weights are widened. Assumed; an 8B model on H100 took 31 ms a step
# for it where this gives 45 (finetuning_h100_202611.md).
WIDENING_EFFICIENCY = 0.5


def adapter_parameters(model: ModelSpec, tuning: FineTuning) -> int:
    """Parameters of all adapters: of a matrix from n to m, rank x (n + m)."""
    hidden, ffn = model.hidden_size, model.ffn_size
    query, kv = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    sides = 2 * (hidden + query) + 2 * (hidden + kv)
    if tuning.lora_targets == "all":
        sides += (3 if model.gated_mlp else 2) * (hidden + ffn)
    return model.layers * tuning.lora_rank * sides


def trained_parameters(model: ModelSpec, tuning: FineTuning) -> int:
    """Parameters that have gradients."""
    if tuning.adapts:
        return adapter_parameters(model, tuning)
    if tuning.frozen == "none":
        return model.parameters
    tables = (model.vocab_size + model.learned_positions) * model.hidden_size
    return max(1, round(model.parameters - tables - tuning.frozen_layers * model.layer_parameters))


def with_fine_tuning(x: Inputs, model: ModelSpec, recipe: Recipe) -> Inputs:
    """Replace the bytes of ``x`` by a fine-tuning recipe's, as averages over the model's parameters."""
    tuning = recipe.tuning
    if recipe.pure:
        # https://docs.pytorch.org/docs/2.11/generated/torch.optim.AdamW.html: moments are made like the parameter.
        # Blockwise quantisation bounds the update with 8-bit moments, not the bytes it moves.
        halved = 1.0 if recipe.optimizer == EIGHT_BIT else 0.5
        x = replace(
            x,
            weight_bytes=2.0,
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            cast_bytes=0.0,
            autocast=0.0,
            residual_bytes=2.0,
            bucket_bytes=0.5 * x.bucket_bytes,
            optimizer_state_bytes=halved * x.optimizer_state_bytes,
            optimizer_traffic_bytes=halved * x.optimizer_traffic_bytes,
        )
    if tuning.trains_all:
        return x
    share = trained_parameters(model, tuning) / model.parameters
    base_bytes, cast_bytes, residual_bytes = x.weight_bytes, x.cast_bytes * share, x.residual_bytes
    matrices = model.layers * (model.attention_matrix_parameters + model.expert_matrix_parameters)
    if tuning.adapts:
        # A base in the products' own type needs no copies.
        base_bytes = residual_bytes = x.element_bytes
        cast_bytes = 0.0
        if tuning.four_bit:
            base_bytes += (NF4_BYTES - base_bytes) * min(1.0, matrices / model.parameters)
        base_bytes += share * (2.0 if recipe.pure else ADAPTER_BYTES)
    table_trains = not tuning.adapts and not model.tied_embeddings
    return replace(
        x,
        trained=share,
        frozen_layers=float(tuning.frozen_layers),
        trains_layers=float(not tuning.adapts),
        trains_head=float(table_trains),
        adapter_rank=float(tuning.lora_rank if tuning.adapts else 0),
        adapts_mlp=float(tuning.adapts and tuning.lora_targets == "all"),
        four_bit=float(tuning.four_bit),
        autocast=0.0 if tuning.adapts else x.autocast,
        weight_bytes=base_bytes,
        cast_bytes=cast_bytes,
        residual_bytes=residual_bytes,
        gradient_bytes=x.gradient_bytes * share,
        reduce_bytes=x.reduce_bytes * share,
        bucket_bytes=x.bucket_bytes * share,
        optimizer_state_bytes=x.optimizer_state_bytes * share,
        optimizer_traffic_bytes=x.optimizer_traffic_bytes * share,
    )


def check_fine_tuning(model: ModelSpec, recipe: Recipe) -> None:
    """Refuse a method that the estimate has no equations for."""
    tuning = recipe.tuning
    if not tuning.adapts:
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            if (value := getattr(tuning, name)) != getattr(FULL_TRAINING, name):
                raise InvalidInputError(
                    f"{name} is {value}, and method full",
                    limit="method lora or qlora",
                    why="only they train adapters",
                    next_step=f"--method lora, or leave out --{name.replace('_', '-')}",
                )
    if tuning.trains_all and not recipe.pure:
        return
    words = tuning.in_words or "precision pure-bf16"
    if not model.layers or model.experts or not (tuning.trains_all or model.has_like_layers):
        kind = (
            "a mixture of experts" if model.experts else "no stack of like layers" if model.layers else "no transformer"
        )
        raise InvalidInputError(
            f"{words}, and {model.name} is {kind}",
            limit="a dense decoder or encoder of tokens",
            why="only its projections and layers are known one by one",
            next_step="leave out --method, --frozen and pure-bf16",
        )
    if recipe.framework not in ("torch", "gpufleet"):
        raise InvalidInputError(
            f"{words}, and framework {recipe.framework}",
            limit="framework torch or gpufleet",
            why="the costs are those of Hugging Face's modules with peft and bitsandbytes",
            next_step="leave out --framework",
        )
    if tuning.frozen_layers >= model.layers:
        raise InvalidInputError(
            f"frozen is {tuning.frozen}",
            limit=f"at most {model.layers - 1}: {model.name} has {model.layers} layers",
            why="the last layer at least must train",
        )
    if tuning.adapts and tuning.frozen != "none":
        raise InvalidInputError(
            f"frozen is {tuning.frozen}, and method {tuning.method}",
            limit="frozen none",
            why="adapters train over a base that is frozen as a whole",
            next_step="leave out --frozen",
        )
    if tuning.four_bit and recipe.precision != "bf16":
        raise InvalidInputError(
            f"method is qlora, and precision {recipe.precision}",
            limit="bf16 or pure-bf16",
            why="4-bit weights are widened to bf16 for each product",
            next_step="--precision bf16",
        )


def live_share(x: Inputs) -> Number:
    """Share of the layers that the backward pass reaches."""
    return 1.0 - x.frozen_layers / np.maximum(x.layers, 1.0)


def layer_products(x: Inputs, repeated: Number) -> Number:
    """Products of a layer in units of its forward pass, on average: 3 where all weights train, 2 with a frozen base."""
    return np.asarray(1.0 + live_share(x) * (1.0 + x.trains_layers + repeated), dtype=np.float64)


def adapter_seconds(x: Inputs, tokens: Number, again: Number, flop_per_s: Number, byte_per_s: Number) -> Number:
    """Seconds of one layer's adapters in a micro-batch; ``again``: forward passes that are computed twice."""
    inputs, outputs, _ = _sides(x)
    forward = ADAPTER_INPUT[0] * inputs + ADAPTER_OUTPUT[0] * outputs
    backward = ADAPTER_INPUT[1] * inputs + ADAPTER_OUTPUT[1] * outputs
    moved = x.element_bytes * tokens * (forward * (1.0 + again) + backward)
    flops = 2.0 * tokens * x.adapter_rank * (inputs + outputs) * (3.0 + again)
    return np.where(x.adapter_rank > 0, flops / flop_per_s + moved / byte_per_s, 0.0)


def widening_seconds(x: Inputs, again: Number, byte_per_s: Number) -> Number:
    """Seconds that one layer's 4-bit weights take to be widened, forward and backward."""
    matrices = x.layer_matrix / x.tensor
    moved = (2.0 + again) * matrices * (NF4_BYTES + x.element_bytes)
    return x.four_bit * moved / (WIDENING_EFFICIENCY * byte_per_s)


def further_kernels(x: Inputs, again: Number) -> Number:
    """Kernels that one layer starts beyond its own."""
    count = _sides(x)[2]
    adapters: Number = count * (ADAPTER_KERNELS[0] * (1.0 + again) + ADAPTER_KERNELS[1]) * np.sign(x.adapter_rank)
    return adapters + x.four_bit * (4.0 + x.mlp_matrices) * FOUR_BIT_KERNELS * (2.0 + again)


def host_factor(x: Inputs, full: Number) -> Number:
    """Host time of a layer over that of the same layer trained in full: as its kernels."""
    own = kernels.WRITTEN_KERNELS * (3.0 + full)
    return 1.0 + further_kernels(x, full) / own


def unsaved_bytes(x: Inputs) -> Number:
    """Bytes a token that a layer with adapters saves less than one whose weights train.

    Frozen norms that are written out keep no normalised input, and a product without an adapter no input; an adapter
    keeps its inner vector.
    """
    element, (_, _, count) = x.element_bytes, _sides(x)
    norms = 2.0 * element * x.llama_like * x.hidden * (1.0 - x.fused_norms)
    products = (1.0 - x.adapts_mlp) * element * (x.hidden + x.ffn)
    return np.where(x.adapter_rank > 0, norms + products - element * x.adapter_rank * count, 0.0)


def widened_bytes(x: Inputs) -> Number:
    """Bytes of the largest 4-bit weight while it is widened."""
    return x.four_bit * x.element_bytes * x.hidden * np.maximum(x.ffn, x.query) / x.tensor


def _sides(x: Inputs) -> tuple[Number, Number, Number]:
    """Sum of the inputs and of the outputs of one layer's adapted matrices, and their number."""
    up = x.mlp_matrices - 1.0
    inputs = 3.0 * x.hidden + x.query + x.adapts_mlp * (up * x.hidden + x.ffn)
    outputs = x.query + 2.0 * x.kv + x.hidden + x.adapts_mlp * (up * x.ffn + x.hidden)
    return inputs, outputs, 4.0 + x.adapts_mlp * x.mlp_matrices
