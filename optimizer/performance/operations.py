"""The table of a step: what one micro-batch runs and keeps on one rank, an operation a row, for all layers.

Symbols: t tokens of a micro-batch on a rank, h hidden size, b bytes of an element, T tensor ranks, E expert ranks.
A new family is a function that yields its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.case import Case
from optimizer.performance.fine_tuning import adapted_sides
from optimizer.performance.frameworks import MEGATRON
from optimizer.performance.types import FULL, SELECTIVE, ZERO2, ZERO3, Number
from optimizer.workload.profile.records import BatchLine, ModuleProfile, Pass

Part = Literal["matmul", "attention", "elementwise", "head"]
PARTS: tuple[Part, ...] = ("matmul", "attention", "elementwise", "head")
# The fitted numbers that scale an operation's seconds, and "" for none: FLOPs over a peak by an efficiency, bytes over
# the memory's rate by a factor on the traffic.
Unit = Literal["matmul_efficiency", "attention_efficiency", ""]
Traffic = Literal["elementwise_traffic", ""]

# Products are computed in tiles of 128 rows, each expert's last half empty on average
# (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication, tile quantization).
TILE_ROWS = 128.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One row: sums of all its passes in one micro-batch, recomputation included.

    Attributes:
        count: layers that have it.
        flops, flop_per_s, unit: of one layer, the peak of what computes them, and the number that is fitted to it.
        moved, traffic: bytes of one layer, and their fitted factor.
        kernels: started in one layer.
        kept: bytes a token of one layer for its backward pass (Korthikanti et al., arXiv:2205.05198, section 4).
    """

    name: str
    part: Part = "elementwise"
    count: Number = 1.0
    flops: Number = 0.0
    flop_per_s: Number = 1.0
    unit: Unit = ""
    moved: Number = 0.0
    traffic: Traffic = "elementwise_traffic"
    kernels: Number = 0.0
    kept: Number = 0.0


def _product(name: str, flops: Number, flop_per_s: Number, sides: Number, **fields: Any) -> Operation:
    """A matrix product or convolution, with the bytes of its ``sides`` in all passes."""
    settings: dict[str, Any] = {"part": "matmul", "unit": "matmul_efficiency", "traffic": ""} | fields
    return Operation(name=name, flops=flops, flop_per_s=flop_per_s, moved=sides * kernels.PRODUCT_TRAFFIC, **settings)


def operations(x: Case) -> Iterator[Operation]:
    """List the operations of a micro-batch, forward and backward."""
    if x.model.layers:
        yield from _products(x)
        yield from _attention(x)
        yield from _elementwise(x)
        if x.model.experts:
            yield from _experts(x)
        if x.recipe.tuning.adapts:
            yield from _adapters(x)
        yield from _head(x)
    if x.model.profile is not None:
        yield from _module(x, x.model.profile)
    elif x.model.flops_per_sample:
        yield from _convolutions(x)


def model_flops_per_sample(x: Case) -> float:
    """Useful FLOPs of one sample, forward and backward: no recomputation, half the scores of causal attention.

    Frozen weights have no products for gradients of their own.
    """
    model = x.model
    scores = 4.0 * x.sample_tokens * x.keys * x.query * (0.5 * x.seen if x.causal else 1.0)
    products = 2.0 * x.matrix * x.sample_tokens * (1.0 + x.live_share * (2.0 - x.recipe.tuning.adapts))
    layers = model.layers * (products + scores * (1.0 + 2.0 * x.live_share))
    head = 2.0 * x.sample_head_tokens * x.table_parameters * (2.0 + x.trains_head)
    profile = model.profile
    further = profile.forward_flops.total + profile.backward_flops.total if profile else 3.0 * model.flops_per_sample
    return layers + head + further


def _product_passes(x: Case) -> Number:
    """Passes over a layer's products: 3 where all weights train, 2 with a frozen base, and those that are repeated."""
    # Full recomputation repeats whole layers, selective a share of their products. torch's checkpoint ends before the
    # last product, unless dropout or a cast to 8 bits reads its output (759 products in a step instead of 787,
    # h200_fp8_202611.md).
    stops = x.code.written_out and not (x.has_dropout or x.recipe.compiled or x.casts_fp8 or x.model.experts)
    never = stops * x.model.hidden_size * x.model.ffn_size / x.matrix
    repeated = np.where(x.checkpointing == SELECTIVE, x.code.selective_recompute, x.repeats * (1.0 - never))
    return 1.0 + x.live_share * (2.0 - x.recipe.tuning.adapts + repeated)


def _products(x: Case) -> Iterator[Operation]:
    """List attention's projections, which keep attention's inputs and output, and the feed-forward block."""
    model, h, passes = x.model, x.model.hidden_size, _product_passes(x)
    peak = x.rates.peak / (kernels.FROZEN_FP8_PRODUCT if x.recipe.tuning.adapts and x.has_fused_fp8 else 1.0)

    def product(name: str, matrix: float, weights: float, whole: float, sliced: float, kept: Number) -> list[Operation]:
        sides = weights / x.tensor + x.tokens * (whole + sliced / x.tensor)
        flops = passes * (2.0 * matrix) * x.tokens / x.tensor
        row = _product(name, flops, peak, passes * x.element * sides, count=model.layers, kept=kept)
        if not x.casts_fp8 or (model.experts and name == "feed-forward"):  # torchao casts no experts
            return [row]
        moved = (kernels.COMPILED_FP8_CAST if x.recipe.compiled else kernels.FP8_CAST) * passes * sides
        return [row, Operation(name="casts to 8 bits", count=model.layers, moved=moved)]

    # Latents are kept before and after their norms, attention's output in 16 bits beside the 8 of a product's input.
    latent = model.latent_attention.latent_width if model.latent_attention else 0
    inputs = 0.0 if "mla_up_proj" in x.recipe.recomputed else (x.query + 2.0 * x.kv) / x.tensor
    yield from product(
        "attention projections", x.attention_matrix, model.attention_matrix_parameters,
        2.0 * h + latent, 2.0 * x.query + 2.0 * x.kv,
        x.element * (inputs + 2.0 * latent) + (x.element + x.has_fused_fp8) * x.query / x.tensor,
    )  # fmt: skip
    # T5 1.1's gate is GPT-2's function; T5's dropout there keeps a mask.
    by_operators = x.is_t5 if model.gated_mlp else x.causal
    kept = kernels.WRITTEN_GELU_TENSORS * x.residual * x.is_eager * by_operators + x.is_t5 * x.has_dropout
    # MLPerf's adapters keep the gate's inputs in 8 bits (FP8_ACTIVATION, Megatron's activation_func_fp8_input_store).
    gate = 1.0 if x.has_fused_fp8 and x.recipe.tuning.adapts else x.element
    kept = kept + gate * x.gate_inputs + x.input_element
    yield from product(
        "feed-forward", x.matrix - x.attention_matrix - model.matrices_per_ffn * h * x.routed,
        x.layer_parameters - model.attention_matrix_parameters - x.expert_parameters,
        h, model.matrices_per_ffn * x.inner, kept * x.inner / x.tensor,
    )  # fmt: skip


def _attention(x: Case) -> Iterator[Operation]:
    """List what is computed of a score: with or without a fused kernel."""
    scores = x.tokens * (x.keys * x.heads) / x.tensor
    products = x.tokens * (4.0 * x.keys * x.query) / x.tensor
    # Frozen layers have no backward pass: 2.5 of attention's 3.5 products.
    layers = x.model.layers * (1.0 + 2.5 * x.live_share) / 3.5
    if not x.has_flash:
        written = kernels.WRITTEN_SCORES_32_BIT if x.element > 2.0 else kernels.WRITTEN_SCORES
        written = kernels.COMPILED_SCORES if x.compiles_whole else written
        forward, backward = written if x.code.written_out else kernels.FUSED_SCORES
        for has, (capped, capped_again) in ((x.model.soft_cap, kernels.SOFT_CAP), (x.model.sinks, kernels.SINKS)):
            if has and x.code.written_out:
                forward, backward = forward + capped, backward + capped_again
        # A score's softmax, the product's input if another tensor, a mask byte, and the output of a soft cap's tanh:
        # 4.2 bytes a score in 32 bits and 5.1 by a compiler on H200 (Llama 1B in tf32 and BERT base, torch 2.11,
        # 2026-11-21).
        is_compiled = x.recipe.compiled and x.has_dropout and not x.causal
        softmax = x.element if is_compiled else max(x.wide_residual, 4.0 * x.code.written_out)
        copied = x.element if softmax > x.element else x.element * x.has_dropout
        kept = softmax + copied + x.has_dropout + x.model.soft_cap * x.element
        yield Operation(
            name="scores", part="attention", count=layers,
            flops=(3.0 + x.checkpoints) * products, flop_per_s=x.rates.peak, unit="matmul_efficiency",
            moved=scores * x.element * (forward * (1.0 + x.checkpoints) + backward),
            kept=x.heads * x.keys * kept / x.tensor,
        )  # fmt: skip
        if x.compiles_whole:  # a third of the compiler's products run in 32 bits
            rate = kernels.FP32_BATCHED * x.rates.fp32
            yield Operation(name="scores in 32 bits", part="attention", count=layers, flops=products, flop_per_s=rate)
        return
    # T5's mask is its bias. A kernel that knows a window leaves out the scores beyond it; PyTorch's gets a mask.
    has_mask = x.compiles_whole or x.is_t5
    parts = [(x.masked_share, True), (1.0 - x.masked_share, has_mask)] if x.masked_share else [(x.seen, has_mask)]
    for share, masked in parts:
        halved = x.causal and not masked
        computed, half_length = (0.5, kernels.CAUSAL_HALF_LENGTH) if halved else (1.0, kernels.HALF_LENGTH)
        # The kernels of a context ring see a rank's part of the sequence. 3.5 forward passes in all (arXiv:2307.08691,
        # 3.1).
        shape = computed * (kernels.MASKED_ATTENTION if masked else 1.0) * (1.0 + half_length * x.context / x.keys)
        yield Operation(
            name="attention", part="attention", count=layers * share,
            flops=(3.5 + x.repeats) * products * shape, flop_per_s=x.rates.attention, unit="attention_efficiency",
            moved=scores * x.element * kernels.BIAS_GRADIENT if x.is_t5 else 0.0, traffic="",
        )  # fmt: skip
        if x.code.written_out and x.has_dropout:
            forward, backward = kernels.ATTENTION_DROPOUT
            drawn = computed * scores * (forward * (1.0 + x.repeats) + backward)
            yield Operation(
                name="attention dropout", part="attention", count=layers * share, flops=drawn, flop_per_s=x.rates.fp32
            )


def _row(x: Case, name: str, moved: tuple[float, float], width: Number, kept: Number = 0.0) -> Operation:
    """Kernels that move bytes an element of ``width``, forward and backward, in each layer."""
    forward, backward = moved
    bytes_moved = x.tokens * width * (forward * (1.0 + x.checkpoints) + backward)
    return Operation(name=name, count=x.live_layers, moved=bytes_moved, kept=kept)


def _elementwise(x: Case) -> Iterator[Operation]:
    """List the kernels beside products and attention."""
    model, element, h, heads = x.model, x.element, x.model.hidden_size, (x.query + x.kv) / x.tensor
    # Norms save input and output, a written-out RMSNorm also the normalised input.
    writes_norms = (model.gated_mlp or x.is_t5) and not x.has_fused_norms
    is_written = writes_norms and x.by_hand
    norm = kernels.WRITTEN_NORM if is_written else kernels.NORM
    written = x.is_eager * writes_norms
    output = 0.0 if "layernorm" in x.recipe.recomputed else x.input_element
    kept: Number = np.maximum(x.residual, 4.0 * written) + x.residual * written + output
    norms = h * x.norms / x.split
    yield _row(x, "norms", norm, norms * (1.0 if is_written else x.residual), norms * kept)
    yield _row(x, "residual sums", kernels.RESIDUAL, 2.0 * h * x.residual / x.split)
    if x.has_dropout:
        yield _row(x, "dropout", kernels.DROPOUT, 2.0 * element * h / x.split, 2.0 * h / x.split)
    is_wide: Number = np.where(x.residual > element, 1.0, 0.0)  # under autocast
    if x.wide_residual > element:
        # Each product that reads a wider residual casts it and its gradient; a compiler casts once. Tensor ranks keep
        # the casts of gated blocks whole.
        casts = (1.0, 1.0) if x.recipe.compiled else kernels.CASTS
        whole = model.gated_mlp * kernels.REPEATED_CASTS * (1.0 - 1.0 / x.tensor)
        kept = h * element * is_wide * x.is_eager * (x.input_casts / x.split + whole)
        yield _row(x, "casts", casts, is_wide * (element + x.residual) * h / x.split, kept)
    if model.gated_mlp and not x.is_t5:
        # Under autocast rotary positions save queries and keys again: 3.7 and 3.9 bytes of each on H200 (Llama 410M and
        # 3.6B, torch 2.11, 2026-11-21).
        moved = kernels.WRITTEN_ROTARY if x.by_hand and not x.code.fused_rotary else kernels.FUSED_ROTARY * element
        yield _row(x, "rotary positions", (moved, moved), heads, heads * x.residual * x.is_eager * is_wide)
    if model.head_norms:
        # Under autocast the kernel reads a widened copy.
        widened = x.is_eager * model.gated_mlp * np.maximum(is_wide, float(not x.has_fused_norms))
        kept = heads * (element + kernels.HEAD_NORM_BYTES * widened)
        yield _row(x, "norms of heads", norm, heads * (1.0 if is_written else element), kept)
    yield from _activation_function(x)
    if x.masked_share:
        # PyTorch's attention keeps a mask in each layer with a window, and repeats keys and values there.
        kept = x.masked_share * element * (x.recipe.seq_len + 2.0 * (x.query - x.kv) / x.tensor)
        yield _row(x, "masks of windows", kernels.MASK, x.masked_share * x.recipe.seq_len, kept)
    if not x.code.fused_kernels:
        # Attention's output is kept once more.
        joined = kernels.RING_JOIN * (x.context - 1.0) * x.query / x.tensor
        kept = np.where(x.context > 1, element * x.query / x.tensor, 0.0)
        yield Operation(name="joins of the context ring", count=model.layers, moved=x.tokens * joined, kept=kept)
    each = kernels.WRITTEN_KERNELS if x.by_hand else kernels.FUSED_KERNELS
    starts = x.sublayers * each * (3.0 + x.repeats)
    yield Operation(name="starts of kernels", count=x.live_layers, kernels=starts)


def _activation_function(x: Case) -> Iterator[Operation]:
    """List the activation function, and what T5, Whisper and fused fp8 do beside products."""
    model, element = x.model, x.element
    ffn = (x.inner + x.routed * (x.recipe.graphs != "fused")) / x.tensor
    if model.gated_mlp:
        gate = kernels.COMPILED_SWIGLU if x.recipe.compiled else kernels.SWIGLU
        yield _row(x, "activation function", gate, element * ffn)
    elif x.by_hand and x.code.written_out and x.causal:
        yield _row(x, "activation function", kernels.WRITTEN_GELU, ffn)
    else:
        yield _row(x, "activation function", kernels.GELU, element * ffn)
    if x.is_t5:
        # T5 widens the second product's input to its weight's type (modeling_t5.py, wo).
        widened = np.where(x.autocast & np.logical_not(x.is_narrow), 2.0 * (element + 4.0), 0.0)
        yield _row(x, "within T5's block", (1.0, 1.0), widened * ffn)
        if model.gated_mlp and x.by_hand:
            yield _row(x, "within T5's block", kernels.WRITTEN_GELU, ffn)
    if model.architecture == "speech" and x.by_hand:
        # Whisper copies queries, keys and values to the kernel's order, and scales queries apart.
        copied = kernels.COPIED_HEADS * (x.query + 2.0 * x.kv) + kernels.SCALED_QUERIES * x.query
        yield _row(x, "copies of heads", (1.0, 1.0), element * copied)
    if x.has_fused_fp8:
        quantised = 2.0 * model.hidden_size + x.query / x.tensor + ffn
        yield _row(x, "quantisation", (kernels.QUANTISE_BYTES, kernels.QUANTISE_BYTES), quantised)


def _experts(x: Case) -> Iterator[Operation]:
    """List a mixture's routing and the products of its experts."""
    model, h, fused, passes = x.model, x.model.hidden_size, x.code.fused_kernels, _product_passes(x)
    is_megatron = x.recipe.framework in MEGATRON
    # Rows of each expert's whole tiles.
    local = model.experts / x.expert
    expert_matrix = model.matrices_per_ffn * h * model.ffn_size / x.expert_slices
    rows = x.tokens * model.experts_per_token * x.capacity * x.expert_slices / x.tensor
    slower = 1.0 + kernels.FUSED_GROUPED_INNER * (1.0 / h + 1.0 / model.ffn_size) if fused else kernels.GROUPED_SLOWER
    sides = x.expert_parameters / x.expert / x.expert_slices
    sides = sides + x.tokens * model.matrices_per_ffn * x.routed / x.tensor
    # Megatron multiplies an activation by its router's probability and keeps both, but where one kernel of a gate
    # does it (MLP.forward in megatron/core/transformer/mlp.py at d98e8a6; moe_act repeats it).
    output = (1.0 if x.has_fused_fp8 else x.expert_element) + x.element * (is_megatron and not model.gated_mlp)
    kept = x.expert_element * x.gate_inputs + output * ("moe_act" not in x.recipe.recomputed)
    yield _product(
        "experts", passes * 2.0 * (rows + local * TILE_ROWS / 2.0) * expert_matrix,
        np.where(x.experts_in_32_bits, x.rates.fp32, x.rates.expert / slower),
        passes * x.expert_element * sides * (model.layers / model.mixture_layers),
        count=model.mixture_layers, kept=kept * x.routed * x.kept_capacity / x.tensor,
    )  # fmt: skip
    rows = model.experts_per_token * x.capacity * h * model.mixture_layers / model.layers
    moved = kernels.PERMUTE if fused else kernels.WRITTEN_PERMUTE
    # Megatron alone has experts in fused fp8. Ranks that share an expert keep its rows whole. NVIDIA's recipes permute
    # rows in a kernel that keeps none.
    narrowed = x.input_element / x.element if is_megatron else 1.0
    kept = narrowed * x.expert_slices / x.tensor + (0.0 if x.code.nvidia_recipe else 1.0 / x.split)
    yield _row(x, "routing", moved, rows * (x.element if fused else 1.0), x.dispatched * kept)
    if model.mlp_bias and fused:
        yield _row(x, "routing", kernels.BIASED_OUTPUT, rows)
        yield _row(x, "routing", kernels.CLAMPED_GATE, rows / h * model.ffn_size / x.tensor)


def _adapters(x: Case) -> Iterator[Operation]:
    """List LoRA's products, and the widening of a 4-bit base."""
    inputs, outputs, count = adapted_sides(x.model, x.recipe.tuning)
    layers, again = x.model.layers, x.checkpoints
    of_output = kernels.FUSED_ADAPTER_OUTPUT if x.code.fused_kernels else kernels.ADAPTER_OUTPUT
    forward, backward = (kernels.ADAPTER_INPUT[i] * inputs + of_output[i] * outputs for i in (0, 1))
    # Frozen norms that are written out keep no normalised input, and a product without an adapter no input; an adapter
    # keeps its inner vector.
    unsaved = 2.0 * x.element * x.model.gated_mlp * x.model.hidden_size * (not x.has_fused_norms)
    if x.recipe.tuning.lora_targets != "all":
        unsaved += x.input_element * (x.model.hidden_size + x.model.ffn_size)
    yield Operation(
        name="adapters", part="matmul", count=layers,
        flops=2.0 * x.tokens * x.recipe.tuning.lora_rank * (inputs + outputs) * (3.0 + again),
        flop_per_s=x.rates.peak, unit="matmul_efficiency",
        moved=x.element * x.tokens * (forward * (1.0 + again) + backward), traffic="",
        kept=(x.element * x.recipe.tuning.lora_rank * count - unsaved) / x.split,
    )  # fmt: skip
    yield Operation(name="adapters' kernels", count=layers, kernels=further_kernels(x, again))
    if x.recipe.tuning.four_bit:
        moved = (2.0 + again) * x.matrix / x.tensor * (kernels.NF4_BYTES + x.element) / kernels.WIDENING_EFFICIENCY
        yield Operation(name="widening of 4-bit weights", part="matmul", count=layers, moved=moved, traffic="")


def further_kernels(x: Case, again: Number) -> Number:
    """Kernels that one layer with adapters starts beyond its own."""
    if not x.recipe.tuning.adapts:
        return 0.0
    count = adapted_sides(x.model, x.recipe.tuning)[2]
    widened = x.recipe.tuning.four_bit * (4.0 + x.model.matrices_per_ffn) * kernels.FOUR_BIT_KERNELS
    return count * (kernels.ADAPTER_KERNELS[0] * (1.0 + again) + kernels.ADAPTER_KERNELS[1]) + widened * (2.0 + again)


def _head(x: Case) -> Iterator[Operation]:
    """List the output projection and the loss."""
    h, logits = x.model.hidden_size, x.model.vocab_size / x.tensor
    sides = x.element * (h * logits + x.head_tokens * (h + logits))
    passes = 2.0 + x.trains_head
    flops = passes * 2.0 * x.head_tokens * h * logits
    yield _product("output projection", flops, x.rates.head, passes * sides, part="head")
    bytes_a_logit = x.code.loss_traffic_bytes
    if x.recipe.compiled:
        bytes_a_logit = min(bytes_a_logit, kernels.COMPILED_CROSS_ENTROPY)
    elif x.model.logits_soft_cap:
        bytes_a_logit += sum(kernels.SOFT_CAP) * x.element
    # Hugging Face's tensor ranks each compute the whole loss.
    lost = logits if x.code.splits_logits else x.model.vocab_size
    yield Operation(name="loss", part="head", moved=x.head_tokens * bytes_a_logit * lost, traffic="")


# Each of a convolution's products reads or writes its input and its output.
PASSES_PER_PRODUCT = 2.0


def _convolutions(x: Case) -> Iterator[Operation]:
    """List a CNN's operations, or those of the convolutions in front of an encoder."""
    outputs = x.micro_batch * x.model.activations_per_sample
    left = kernels.COMPILED_CNN if x.recipe.compiled else 1.0
    flops = 3.0 * x.micro_batch * x.model.flops_per_sample
    yield _product("convolutions", flops, x.rates.convolution, 3.0 * PASSES_PER_PRODUCT * outputs * x.element)
    yield Operation(name="batch norms and activations", moved=outputs * x.element * kernels.CNN_PASSES * left)
    if not x.model.layers:
        cycles = (outputs * kernels.CNN_CYCLES + x.micro_batch * kernels.STEM_CYCLES) * left
        yield Operation(name="cycles of batch norms", flops=cycles, flop_per_s=x.rates.cycles)


def _module(x: Case, profile: ModuleProfile) -> Iterator[Operation]:
    """List a profiled module's operations."""
    forward, samples = profile.forward_flops, x.micro_batch
    convolves = 2.0 * forward.convolution > forward.total
    left = kernels.COMPILED_CNN if x.recipe.compiled and convolves else 1.0
    # Outputs of convolutions, as often as they are computed in both passes.
    passes = traced(x, lambda pass_: pass_.flops.convolution / max(forward.convolution, 1.0))
    outputs = passes * (profile.convolution_outputs * samples)
    elements = traced(x, lambda pass_: _of_batch(pass_.product_elements, samples))
    sides = (elements + PASSES_PER_PRODUCT * outputs) * x.element
    yield _product("matrix products", samples * traced(x, lambda pass_: pass_.flops.matmul), x.rates.peak, sides)
    yield _product("convolutions", samples * traced(x, lambda pass_: pass_.flops.convolution), x.rates.convolution, 0.0)
    scores = traced(x, lambda pass_: pass_.flops.attention + 0.5 * forward.attention * (pass_.flops.attention > 0))
    yield Operation(
        name="attention", part="attention", flops=samples * scores, flop_per_s=x.rates.attention,
        unit="attention_efficiency",
    )  # fmt: skip
    yield Operation(
        name="other kernels", flops=outputs / 3.0 * kernels.CNN_CYCLES * left * convolves, flop_per_s=x.rates.cycles,
        moved=traced(x, lambda pass_: _of_batch(pass_.traffic, samples)) * left,
        kernels=traced(x, lambda pass_: float(pass_.kernels)),
    )  # fmt: skip


def _of_batch(line: BatchLine, samples: Number) -> Number:
    return line.fixed_bytes + line.bytes_per_sample * samples


def _plain_pass(x: Case) -> Pass:
    """Pass of a profiled module without activation checkpointing."""
    assert x.model.profile is not None
    none = x.model.profile.passed("16-bit" if x.element == 2.0 else "32-bit", "none")
    assert none is not None  # checked by Case
    return none


def traced(x: Case, read: Callable[[Pass], Number]) -> Number:
    """Figure of a profiled module's pass, with or without activation checkpointing."""
    none = _plain_pass(x)
    full = (x.model.profile and x.model.profile.passed(none.width, "full")) or none
    return np.where(x.checkpointing == FULL, read(full), read(none))


# A profile counts 1,872 kernels on BERT-large (26 layers with its ends), 3,570 on a Llama of 24 layers (36 such) (rows
# h200-steps-* of measured_runs.csv).
KERNELS_PER_LAYER = 85.0
# Host time of a convolution with norm and activation: ResNet-152 of two images takes 29.7 ms longer than ResNet-18,
# 0.22 ms a convolution; a layer of GPT-2 1.42 (H200, torch 2.11, h200_hosts_202611.md).
LAYERS_PER_CONVOLUTION = 0.155


def host_time(x: Case) -> tuple[Number, Number, Number]:
    """Compute the host's time of a micro-batch, beside the GPU's work.

    Layers of plain code; seconds of collectives; and tensor ranks that wait for each other, once a collective, where a
    pipeline spans nodes.
    """
    model, written = x.model, not x.code.fused_kernels
    compiled = kernels.COMPILED_HOST if x.recipe.compiled else 1.0
    shards = (x.sharding >= ZERO2) & (x.ranks > 1)
    if model.profile is not None:
        units = model.profile.blocks.count if model.profile.blocks else 1
        layers = _plain_pass(x).kernels / KERNELS_PER_LAYER * (1.0 + x.repeats)
        return layers + np.where(shards, kernels.FSDP_HOST * units, 0.0), 0.0, 0.0
    layers = model.convolutions * LAYERS_PER_CONVOLUTION * compiled
    # NVIDIA's runs with adapters replay CUDA graphs too (LAYER_CUDA_GRAPH and MCORE_CUDA_GRAPH of MLPerf's configs).
    if not model.layers or x.recipe.graphs in ("whole", "fused") or (x.recipe.tuning.adapts and not written):
        return layers, 0.0, 0.0
    plain = x.sublayers * (kernels.LLAMA_HOST if model.gated_mlp and written else 1.0)
    # Recomputing all or a part of a layer costs the host as much again: 83 against 40 ms a step of Llama 410M, 105 and
    # 97 against 53 of 1B in the trainer (H200, torch 2.11, finetuning_h200_202611.md).
    again = x.checkpoints if written and not x.recipe.compiled else x.repeats
    dtensor = np.where(x.tensor > 1, kernels.DTENSOR_HOST, 1.0) if written else 1.0
    each = plain * compiled * dtensor * (1.0 + again) + np.where(shards, kernels.FSDP_HOST, 0.0)
    further = kernels.ADAPTER_HOST * further_kernels(x, again) / (kernels.WRITTEN_KERNELS * (3.0 + again))
    each = each * (1.0 + further)
    each = each * (1.0 + 2.0 * x.live_share) / 3.0
    if model.experts and not written:
        each = each * kernels.FUSED_MIXTURE_HOST * (kernels.GRAPHED_MIXTURE_HOST if x.recipe.graphs == "part" else 1.0)
    # Times the stages, because a stage gets its share of this sum.
    layers = layers + model.layers * each + kernels.END_LAYERS * x.pipeline
    calls = model.layers * (4.0 + 2.0 * x.repeats)
    outside = (x.tensor > 1) & (x.pipeline > 1) & (x.nodes > 1)
    seconds = np.where(x.tensor > 1, calls * kernels.HOST_S_PER_COLLECTIVE, 0.0)
    return layers, seconds, np.where(outside, calls * x.tensor, 0.0)


def weight_bytes_moved(x: Case) -> Number:
    """Bytes of copies of weights and sums of gradients in a micro-batch."""
    copied: Number = 0.0 if x.casts_fp8 or x.cast_bytes <= 0 else 4.0 + x.cast_bytes
    # FSDP2 copies into and out of its collectives.
    a_step = 1.0 / x.grad_accum
    kept = (x.sharding < ZERO2) | x.code.compiles_layers
    gathers = np.where(x.sharding >= ZERO3, 2.0, np.where(kept, a_step, 1.0))
    reductions = np.where(x.sharding >= ZERO2, 1.0, a_step)
    sharded = gathers * kernels.GATHER_COPY + reductions * kernels.REDUCTION_COPY
    copied = np.where(x.uses_fully_shard, sharded, copied)
    if not x.code.written_out:
        return x.stage_parameters * copied
    # Autograd sums micro-batches' gradients: two reads and a write; FSDP sums only the rank's shard.
    summed = 3.0 * x.gradient_bytes * (1.0 - 1.0 / x.grad_accum)
    reduced = np.where(x.sharding >= ZERO2, x.updated_parameters, x.stage_parameters)
    return x.stage_parameters * copied + reduced * summed
