"""The table of a step: what one micro-batch runs on one rank, an operation a row, for all layers of the model.

Symbols: t tokens of a micro-batch on a rank, h hidden size, b bytes of an element, T tensor ranks, E expert ranks.
``operations`` lists what takes time, ``kept_bytes`` (activations.py) what the backward pass needs, by the same names.
A new family is a function that yields its operations, and one that yields the bytes that they keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.case import USUAL_SUBLAYERS, Case
from optimizer.performance.fine_tuning import (
    ADAPTER_INPUT,
    ADAPTER_KERNELS,
    ADAPTER_OUTPUT,
    FOUR_BIT_KERNELS,
    FROZEN_FP8_PRODUCT,
    FUSED_ADAPTER_HOST,
    FUSED_ADAPTER_OUTPUT,
    NF4_BYTES,
    WIDENING_EFFICIENCY,
    adapted_sides,
)
from optimizer.performance.types import FULL, SELECTIVE, ZERO2, ZERO3, Number
from optimizer.workload.profile.records import ModuleProfile, Pass

Part = Literal["matmul", "attention", "elementwise", "head"]
PARTS: tuple[Part, ...] = ("matmul", "attention", "elementwise", "head")
# The fitted numbers that scale an operation's seconds, and "" for none: FLOPs over a peak by an efficiency, bytes over
# the memory's rate by a factor on the traffic.
Unit = Literal["matmul_efficiency", "attention_efficiency", ""]
Traffic = Literal["elementwise_traffic", ""]

PASSES = (0, 1)  # forward, backward: positions in the pairs of kernels.py and fine_tuning.py
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


def operations(x: Case) -> Iterator[Operation]:
    """List the operations of a micro-batch, forward and backward."""
    if x.model.layers:
        yield from _products(x)
        yield from _attention(x)
        yield from _elementwise(x)
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
    seen = 1.0 - x.windowed * (1.0 - x.seen)
    scores = 4.0 * x.sample_tokens * x.keys * x.query * (0.5 * seen if x.causal else 1.0)
    products = 2.0 * x.matrix * x.sample_tokens * (1.0 + x.live_share * (2.0 - x.recipe.tuning.adapts))
    layers = model.layers * (products + scores * (1.0 + 2.0 * x.live_share))
    head = 2.0 * x.sample_head_tokens * x.table_parameters * (2.0 + x.trains_head)
    if model.profile is not None:
        return layers + head + model.profile.forward_flops.total + model.profile.backward_flops.total
    return layers + head + 3.0 * model.flops_per_sample


def _products(x: Case) -> Iterator[Operation]:
    """List the products of attention's projections, of the feed-forward block, and of routed experts."""
    model = x.model
    # Full recomputation repeats whole layers, selective a share of their products. torch's checkpoint ends before the
    # last product, unless dropout or a cast to 8 bits reads its output (759 products in a step instead of 787,
    # h200_fp8_202611.md).
    stops = x.code.written_out and not (x.has_dropout or x.recipe.compiled or x.casts_fp8 or model.experts)
    never = stops * model.hidden_size * model.ffn_size / max(x.matrix, 1.0)
    repeated = np.where(x.checkpointing == SELECTIVE, x.code.selective_recompute, x.repeats * (1.0 - never))
    # 3 where all weights train, 2 with a frozen base.
    passes = 1.0 + x.live_share * (2.0 - x.recipe.tuning.adapts + repeated)
    peak = x.rates.peak / (FROZEN_FP8_PRODUCT if x.recipe.tuning.adapts and x.has_fused_fp8 else 1.0)
    routed = model.matrices_per_ffn * model.hidden_size * x.routed
    latent = model.latent_attention.latent_width if model.latent_attention else 0
    beside = x.layer_parameters - model.attention_matrix_parameters - x.expert_parameters
    for name, matrix, weights, whole, sliced in (
        (
            "attention projections", x.attention_matrix, model.attention_matrix_parameters,
            2.0 * model.hidden_size + latent, 2.0 * x.query + 2.0 * x.kv,
        ),
        (
            "feed-forward", x.matrix - x.attention_matrix - routed, beside,
            model.hidden_size, model.matrices_per_ffn * x.inner,
        ),
    ):  # fmt: skip
        sides = weights / x.tensor + x.tokens * (whole + sliced / x.tensor)
        yield Operation(
            name=name, part="matmul", count=model.layers,
            flops=passes * (2.0 * matrix) * x.tokens / x.tensor, flop_per_s=peak, unit="matmul_efficiency",
            moved=passes * x.element * sides * kernels.PRODUCT_TRAFFIC, traffic="",
        )  # fmt: skip
        if x.casts_fp8 and not (model.experts and name == "feed-forward"):  # torchao casts no experts
            moved = (kernels.COMPILED_FP8_CAST if x.recipe.compiled else kernels.FP8_CAST) * passes * sides
            yield Operation(name="casts to 8 bits", count=model.layers, moved=moved)
    if not model.experts:
        return
    # Rows of each expert's whole tiles.
    local = model.experts / x.expert
    expert_matrix = model.matrices_per_ffn * model.hidden_size * model.ffn_size / x.expert_slices
    rows = x.tokens * model.experts_per_token * x.capacity * x.expert_slices / x.tensor
    speed = kernels.FUSED_GROUPED_PRODUCT if x.code.fused_kernels else kernels.GROUPED_PRODUCT
    sides = x.expert_parameters / x.expert / x.expert_slices
    sides = sides + x.tokens * model.matrices_per_ffn * x.routed / x.tensor
    yield Operation(
        name="experts", part="matmul", count=model.mixture_layers,
        flops=passes * 2.0 * (rows + local * TILE_ROWS / 2.0) * expert_matrix,
        flop_per_s=np.where(x.experts_in_32_bits, x.rates.fp32, x.rates.expert * speed), unit="matmul_efficiency",
        moved=passes * x.expert_element * sides * (model.layers / model.mixture_layers) * kernels.PRODUCT_TRAFFIC,
        traffic="",
    )  # fmt: skip


def _attention(x: Case) -> Iterator[Operation]:
    """List what is computed of a score: with or without a fused kernel."""
    scores = x.tokens * (x.keys * x.heads) / x.tensor
    products = x.tokens * (4.0 * x.keys * x.query) / x.tensor
    # Frozen layers have no backward pass: 2.5 of attention's 3.5 products.
    layers = x.model.layers * (1.0 + 2.5 * x.live_share) / 3.5
    compiled = x.code.written_out and x.recipe.compiled and not x.code.compiles_layers
    if not x.has_flash:
        written = kernels.WRITTEN_SCORES_32_BIT if x.element > 2.0 else kernels.WRITTEN_SCORES
        written = kernels.COMPILED_SCORES if compiled else written
        forward, backward = written if x.code.written_out else kernels.FUSED_SCORES
        for has, (capped, capped_again) in ((x.model.soft_cap, kernels.SOFT_CAP), (x.model.sinks, kernels.SINKS)):
            if has and x.code.written_out:
                forward, backward = forward + capped, backward + capped_again
        yield Operation(
            name="scores", part="attention", count=layers,
            flops=(3.0 + x.checkpoints) * products, flop_per_s=x.rates.peak, unit="matmul_efficiency",
            moved=scores * x.element * (forward * (1.0 + x.checkpoints) + backward),
        )  # fmt: skip
        if compiled:  # a third of the compiler's products run in 32 bits
            rate = kernels.FP32_BATCHED * x.rates.fp32
            yield Operation(name="scores in 32 bits", part="attention", count=layers, flops=products, flop_per_s=rate)
        return
    # T5's mask is its bias. A kernel that knows a window leaves out the scores beyond it; PyTorch's gets a mask.
    has_mask = compiled or (x.code.written_out and x.is_t5)
    parts = [(1.0 - x.windowed * (1.0 - x.seen), has_mask)]
    if x.masked_share:
        parts = [(x.windowed, True), (1.0 - x.windowed, has_mask)]
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


def _elementwise(x: Case) -> Iterator[Operation]:
    """List the kernels beside products and attention, by their bytes an element of ``width``, forward and backward."""
    model, element, h = x.model, x.element, x.model.hidden_size
    by_hand = not (x.code.fused_kernels or x.recipe.compiled)
    # Frozen layers have no backward pass: 2 of 3 passes.
    layers = model.layers * (1.0 + 2.0 * x.live_share) / 3.0
    again = 1.0 + x.checkpoints

    def row(name: str, moved: tuple[float, float], width: Number) -> Operation:
        return Operation(name=name, count=layers, moved=x.tokens * width * (moved[0] * again + moved[1]))

    heads = (x.query + x.kv) / x.tensor
    ffn = (x.inner + x.routed) / x.tensor
    is_written = (model.gated_mlp or x.is_t5) and by_hand and not x.has_fused_norms
    norm = kernels.WRITTEN_NORM if is_written else kernels.NORM
    yield row("norms", norm, h * x.norms * (1.0 if is_written else x.residual) / x.split)
    yield row("residual sums", kernels.RESIDUAL, 2.0 * h * x.residual / x.split)
    if x.has_dropout:
        yield row("dropout", kernels.DROPOUT, 2.0 * element * h / x.split)
    if x.wide_residual > element:
        # Each product that reads a wider residual casts it and its gradient; a compiler casts once.
        casts = (1.0, 1.0) if x.recipe.compiled else kernels.CASTS
        yield row("casts", casts, np.where(x.residual > element, element + x.residual, 0.0) * h / x.split)
    if model.gated_mlp and not x.is_t5:
        is_written = by_hand and not x.code.fused_rotary
        moved = kernels.WRITTEN_ROTARY if is_written else kernels.FUSED_ROTARY * element
        yield row("rotary positions", (moved, moved), heads)
    if model.head_norms:
        yield row("norms of heads", norm, heads * (1.0 if norm is kernels.WRITTEN_NORM else element))
    if model.gated_mlp:
        gate = kernels.COMPILED_SWIGLU if x.recipe.compiled else kernels.SWIGLU
        yield row("activation function", gate, element * ffn)
    elif by_hand and x.code.written_out and x.causal:
        yield row("activation function", kernels.WRITTEN_GELU, ffn)
    else:
        yield row("activation function", kernels.GELU, element * ffn)
    if x.is_t5:
        # T5 widens the second product's input to its weight's type (modeling_t5.py, wo).
        widened = np.where(x.autocast & np.logical_not(x.is_narrow), 2.0 * (element + 4.0), 0.0)
        yield row("within T5's block", (1.0, 1.0), widened * ffn)
        if model.gated_mlp and by_hand:
            yield row("within T5's block", kernels.WRITTEN_GELU, ffn)
    if model.architecture == "speech" and by_hand:
        # Whisper copies queries, keys and values to the kernel's order, and scales queries apart.
        copied = kernels.COPIED_HEADS * (x.query + 2.0 * x.kv) + kernels.SCALED_QUERIES * x.query
        yield row("copies of heads", (1.0, 1.0), element * copied / x.split)
    if x.masked_share:
        yield row("masks of windows", kernels.MASK, x.masked_share * x.recipe.seq_len)
    if x.has_fused_fp8:
        quantised = 2.0 * h + x.query / x.tensor + ffn
        yield row("quantisation", (kernels.QUANTISE_BYTES, kernels.QUANTISE_BYTES), quantised)
    if not x.code.fused_kernels:
        joined = kernels.RING_JOIN * (x.context - 1.0) * x.query / x.tensor
        yield Operation(name="joins of the context ring", count=model.layers, moved=x.tokens * joined)
    if model.experts:
        rows = model.experts_per_token * x.capacity * h * model.mixture_layers / model.layers
        fused = x.code.fused_kernels
        yield row("routing", *((kernels.PERMUTE, rows * element) if fused else (kernels.WRITTEN_PERMUTE, rows)))
        if model.mlp_bias and fused:
            yield row("routing", kernels.BIASED_OUTPUT, rows)
            yield row("routing", kernels.CLAMPED_GATE, rows / h * model.ffn_size / x.tensor)
    each = kernels.WRITTEN_KERNELS if by_hand else kernels.FUSED_KERNELS
    starts = x.sublayers / USUAL_SUBLAYERS * each * (3.0 + x.repeats)
    yield Operation(name="starts of kernels", count=layers, kernels=starts)


def _adapters(x: Case) -> Iterator[Operation]:
    """List LoRA's products, and the widening of a 4-bit base."""
    inputs, outputs, _ = adapted_sides(x.model, x.recipe.tuning)
    layers, again = x.model.layers, x.checkpoints
    of_output = FUSED_ADAPTER_OUTPUT if x.code.fused_kernels else ADAPTER_OUTPUT
    forward, backward = (ADAPTER_INPUT[i] * inputs + of_output[i] * outputs for i in PASSES)
    yield Operation(
        name="adapters", part="matmul", count=layers,
        flops=2.0 * x.tokens * x.recipe.tuning.lora_rank * (inputs + outputs) * (3.0 + again),
        flop_per_s=x.rates.peak, unit="matmul_efficiency",
        moved=x.element * x.tokens * (forward * (1.0 + again) + backward), traffic="",
    )  # fmt: skip
    yield Operation(name="adapters' kernels", count=layers, kernels=further_kernels(x, again))
    if x.recipe.tuning.four_bit:
        moved = (2.0 + again) * x.matrix / x.tensor * (NF4_BYTES + x.element) / WIDENING_EFFICIENCY
        yield Operation(name="widening of 4-bit weights", part="matmul", count=layers, moved=moved, traffic="")


def further_kernels(x: Case, again: Number) -> Number:
    """Kernels that one layer with adapters starts beyond its own."""
    if not x.recipe.tuning.adapts:
        return 0.0
    count = adapted_sides(x.model, x.recipe.tuning)[2]
    widened = x.recipe.tuning.four_bit * (4.0 + x.model.matrices_per_ffn) * FOUR_BIT_KERNELS
    return count * (ADAPTER_KERNELS[0] * (1.0 + again) + ADAPTER_KERNELS[1]) + widened * (2.0 + again)


def _head(x: Case) -> Iterator[Operation]:
    """List the output projection and the loss."""
    h, logits = x.model.hidden_size, x.model.vocab_size / x.tensor
    sides = x.element * (h * logits + x.head_tokens * (h + logits))
    passes = 2.0 + x.trains_head
    yield Operation(
        name="output projection", part="head",
        flops=passes * 2.0 * x.head_tokens * h * logits, flop_per_s=x.rates.head, unit="matmul_efficiency",
        moved=passes * sides * kernels.PRODUCT_TRAFFIC, traffic="",
    )  # fmt: skip
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
    yield Operation(
        name="convolutions", part="matmul",
        flops=3.0 * x.micro_batch * x.model.flops_per_sample, flop_per_s=x.rates.convolution, unit="matmul_efficiency",
        moved=3.0 * PASSES_PER_PRODUCT * outputs * x.element * kernels.PRODUCT_TRAFFIC, traffic="",
    )  # fmt: skip
    yield Operation(name="batch norms and activations", moved=outputs * x.element * kernels.CNN_PASSES * left)
    if not x.model.layers:
        cycles = (outputs * kernels.CNN_CYCLES + x.micro_batch * kernels.STEM_CYCLES) * left
        yield Operation(name="cycles of batch norms", flops=cycles, flop_per_s=x.rates.cycles)


def _module(x: Case, profile: ModuleProfile) -> Iterator[Operation]:
    """List a profiled module's operations."""
    forward = profile.forward_flops
    left = kernels.COMPILED_CNN if x.recipe.compiled else 1.0
    convolves = 2.0 * forward.convolution > forward.total

    def costs(traced: Pass) -> tuple[Number, ...]:
        convolutions = traced.flops.convolution / max(forward.convolution, 1.0)
        outputs = profile.convolution_outputs * x.micro_batch
        lines = traced.product_elements, traced.traffic
        elements, moved = (line.fixed_bytes + line.bytes_per_sample * x.micro_batch for line in lines)
        halved = 0.5 * forward.attention * (traced.flops.attention > 0)
        return (
            x.micro_batch * traced.flops.matmul,
            x.micro_batch * traced.flops.convolution,
            (elements + PASSES_PER_PRODUCT * convolutions * outputs) * x.element,
            x.micro_batch * (traced.flops.attention + halved),
            moved * (left if convolves else 1.0),
            outputs * convolutions / 3.0 * kernels.CNN_CYCLES * left * convolves,
            float(traced.kernels),
        )

    once, again = (costs(traced) for traced in module_passes(x, profile))
    matmul, convolution, sides, attention, moved, cycles, started = (
        np.where(x.checkpointing == FULL, b, a) for a, b in zip(once, again, strict=True)
    )
    yield Operation(
        name="matrix products", part="matmul", flops=matmul, flop_per_s=x.rates.peak, unit="matmul_efficiency",
        moved=sides * kernels.PRODUCT_TRAFFIC, traffic="",
    )  # fmt: skip
    yield Operation(
        name="convolutions", part="matmul", flops=convolution, flop_per_s=x.rates.convolution,
        unit="matmul_efficiency",
    )  # fmt: skip
    yield Operation(
        name="attention", part="attention", flops=attention, flop_per_s=x.rates.attention, unit="attention_efficiency"
    )
    yield Operation(name="other kernels", flops=cycles, flop_per_s=x.rates.cycles, moved=moved, kernels=started)


def module_passes(x: Case, profile: ModuleProfile) -> tuple[Pass, Pass]:
    """Passes without and with activation checkpointing."""
    width: Literal["16-bit", "32-bit"] = "16-bit" if x.element == 2.0 else "32-bit"
    none = profile.passed(width, "none")
    assert none is not None  # checked by Case
    return none, profile.passed(width, "full") or none


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
        none, _ = module_passes(x, model.profile)
        units = model.profile.blocks.count if model.profile.blocks else 1
        # Recomputation takes the host as long again.
        layers = none.kernels / KERNELS_PER_LAYER * (1.0 + x.repeats)
        layers = layers + np.where((x.sharding >= ZERO2) & (x.data > 1), kernels.FSDP_HOST * units, 0.0)
        return layers, 0.0, 0.0
    layers = model.convolutions * LAYERS_PER_CONVOLUTION * compiled
    if not model.layers:
        return layers, 0.0, 0.0
    plain = x.sublayers / USUAL_SUBLAYERS * (kernels.LLAMA_HOST if model.gated_mlp and written else 1.0)
    # Recomputing costs the host as much again: 83 against 40 ms a step of Llama 410M (H200, torch 2.11, 2026-11-21).
    dtensor = np.where(x.tensor > 1, kernels.DTENSOR_HOST, 1.0) if written else 1.0
    each = plain * compiled * dtensor * (1.0 + x.repeats) + np.where(shards, kernels.FSDP_HOST, 0.0)
    if x.recipe.tuning.adapts and not written:
        each = each * FUSED_ADAPTER_HOST
    else:  # an adapter's host time is as its kernels
        each = each * (1.0 + further_kernels(x, x.repeats) / (kernels.WRITTEN_KERNELS * (3.0 + x.repeats)))
    each = each * (1.0 + 2.0 * x.live_share) / 3.0
    if model.experts and not written:
        each = each * kernels.FUSED_MIXTURE_HOST
    # Times the stages, because a stage gets its share of this sum.
    layers = layers + model.layers * each + kernels.END_LAYERS * x.pipeline
    calls = model.layers * (4.0 + 2.0 * x.repeats)
    outside = (x.tensor > 1) & (x.pipeline > 1) & (x.nodes > 1)
    seconds = np.where(x.tensor > 1, calls * kernels.HOST_S_PER_COLLECTIVE, 0.0)
    return layers, seconds, np.where(outside, calls * x.tensor, 0.0)


def weight_bytes_moved(x: Case) -> Number:
    """Bytes of copies of weights and sums of gradients in a micro-batch."""
    copied: Number = 0.0 if x.casts_fp8 or x.cast_bytes <= 0 else 4.0 + x.cast_bytes
    if x.code.fsdp2:
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
