"""FLOPs, traffic and time of computation on one rank (docs/estimator.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.experts import experts
from optimizer.performance.fine_tuning import (
    adapter_seconds,
    further_kernels,
    host_factor,
    layer_products,
    live_share,
    widening_seconds,
)
from optimizer.performance.inputs import Inputs
from optimizer.performance.samples import sample_costs, sample_flops
from optimizer.performance.stacks import USUAL_SUBLAYERS
from optimizer.performance.stage import (
    computes_narrow,
    grouped_in_32_bits,
    layer_parameters,
    masks_windows,
    residual_bytes,
    scores_by_compiler,
    shards_by_fsdp2,
    stage_parameters,
    tokens_of_rank,
    updated_parameters,
)
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO2, ZERO3, Flag, Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Seconds of one micro-batch on one rank; ``waits`` is host time that always stalls the GPU."""

    layer_matmul: Number
    layer_attention: Number
    layer_elementwise: Number
    head: Number
    weights: Number
    host: Number
    waits: Number
    late: Number


def model_flops_per_sample(x: Inputs) -> Number:
    """Useful FLOPs of one sample, forward and backward: no recomputation, half the scores of causal attention.

    Frozen weights have no products for gradients of their own.
    """
    seen = 1.0 - x.windowed * (1.0 - x.window_scores)
    scores = 4.0 * x.tokens * x.keys * x.query * np.where(x.causal > 0, 0.5 * seen, 1.0)
    layers = 2.0 * x.layer_matrix * x.tokens * layer_products(x, 0.0) + scores * (1.0 + 2.0 * live_share(x))
    return x.layers * layers + 2.0 * x.head_tokens * x.hidden * x.vocab * (2.0 + x.trains_head) + sample_flops(x)


def compute(x: Inputs) -> Compute:
    """Compute the seconds of one micro-batch on one rank, by part."""
    c = x.coefficients
    tokens = tokens_of_rank(x)
    element = x.element_bytes
    byte_per_s = x.memory_byte_per_s * kernels.MEMORY_EFFICIENCY
    flop_per_s = x.peak_flop_per_s * c.matmul_efficiency
    # Full recomputation repeats whole layers, selective a share of their products.
    full = np.where(x.checkpointing == FULL, 1.0, 0.0)
    repeated = np.where(x.checkpointing == SELECTIVE, x.selective_recompute, full * (1.0 - _never_repeated(x)))

    inner = x.shared_ffn + x.routed_ffn
    widths = 3.0 * x.hidden + x.latent + (2.0 * x.query + 2.0 * x.kv + x.mlp_matrices * inner) / x.tensor
    volume = 2.0 * tokens * x.layer_matrix / x.tensor
    sides = element * (layer_parameters(x, x.expert) / x.tensor + tokens * widths)
    matmul = x.layers * layer_products(x, repeated) * (volume / flop_per_s + c.matmul_traffic * sides / byte_per_s)
    attention = x.layers * _attention_seconds(x, tokens, full)
    traffic = x.layers * tokens * _layer_traffic(x)
    written = np.where(x.fused_kernels > 0, kernels.FUSED_KERNELS, kernels.WRITTEN_KERNELS)
    per_pass = np.where(x.compiled > 0, kernels.COMPILED_KERNELS, written)
    starts = x.layers * _sublayers(x) * per_pass * (3.0 + full) * c.kernel_s

    if np.any(x.frozen_layers > 0):  # they have no backward pass: 2.5 of attention's 3.5 products, 2 of 3 passes
        live = live_share(x)
        attention = attention * (1.0 + 2.5 * live) / 3.5
        traffic, starts = traffic * (1.0 + 2.0 * live) / 3.0, starts * (1.0 + 2.0 * live) / 3.0

    # A CNN or a profiled module.
    samples = sample_costs(x)
    matmul = matmul + samples.product_flops / flop_per_s + c.matmul_traffic * samples.product_bytes / byte_per_s
    matmul = matmul + samples.convolution_flops / (flop_per_s * x.convolution)
    attention = attention + samples.attention_flops / (x.attention_flop_per_s * c.attention_efficiency)
    elementwise = (traffic + samples.traffic_bytes) * c.elementwise_traffic / byte_per_s + starts
    elementwise = elementwise + samples.cycles / x.cycle_per_s + samples.kernels * c.kernel_s
    if np.any(x.context > 1):
        joined = np.where(x.fused_kernels > 0, 0.0, kernels.RING_JOIN * (x.context - 1.0)) * x.query / x.tensor
        elementwise = elementwise + x.layers * tokens * joined * c.elementwise_traffic / byte_per_s
    if np.any(x.fp8_cast_bytes > 0):
        elementwise = elementwise + x.layers * _fp8_cast_bytes(x, tokens, full) * c.elementwise_traffic / byte_per_s

    if np.any(x.adapter_rank > 0):
        again = np.where(x.checkpointing == NONE, 0.0, 1.0)
        matmul = matmul + x.layers * adapter_seconds(x, tokens, again, flop_per_s, byte_per_s)
        matmul = matmul + x.layers * widening_seconds(x, again, byte_per_s)
        elementwise = elementwise + x.layers * further_kernels(x, again) * c.kernel_s

    mixture = experts(x)
    matmul = matmul + mixture.flop_s
    elementwise = elementwise + mixture.traffic_bytes / byte_per_s + mixture.starts * c.kernel_s

    logits = x.vocab / x.tensor
    head_tokens = x.micro_batch * x.head_tokens / x.context
    head_flops = 2.0 * head_tokens * x.hidden * logits
    head_sides = element * (x.hidden * logits + head_tokens * (x.hidden + logits))
    head_flop_per_s = x.head_flop_per_s * c.matmul_efficiency
    products = (2.0 + x.trains_head) * (head_flops / head_flop_per_s + c.matmul_traffic * head_sides / byte_per_s)
    by_compiler = np.minimum(x.loss_traffic_bytes, kernels.COMPILED_CROSS_ENTROPY)
    loss = np.where(x.compiled > 0, by_compiler, x.loss_traffic_bytes)
    loss = loss + x.logits_soft_cap * (1.0 - x.compiled) * sum(kernels.SOFT_CAP) * element
    # Hugging Face's tensor ranks each compute the whole loss.
    lost = np.where(x.splits_logits > 0, logits, x.vocab)
    head = products + head_tokens * (loss * lost + 6.0 * x.hidden * residual_bytes(x)) / byte_per_s
    copied = np.where((x.cast_bytes > 0) & (x.fp8_cast_bytes == 0), 4.0 + x.cast_bytes, 0.0)
    copied = np.where(shards_by_fsdp2(x), _sharded_copies(x), copied)
    # Autograd sums micro-batches' gradients: two reads and a write; FSDP sums only the rank's shard.
    summed = x.written_out * 3.0 * x.gradient_bytes * (1.0 - 1.0 / x.grad_accum)
    reduced = np.where(x.sharding >= ZERO2, updated_parameters(x), stage_parameters(x))
    weights = (stage_parameters(x) * copied + reduced * summed) / byte_per_s
    host_of_layer = c.host_s_per_layer * _host_of_layer(x)
    return Compute(
        layer_matmul=matmul * c.overhead,
        layer_attention=attention * c.overhead,
        layer_elementwise=elementwise * c.overhead,
        head=head * c.overhead,
        weights=weights,
        host=_host_seconds(x, full) + samples.layers * c.host_s_per_layer + mixture.host_layers * host_of_layer,
        waits=mixture.wait_layers * host_of_layer,
        late=_late_seconds(x, full),
    )


def _sharded_copies(x: Inputs) -> Number:
    """Bytes a parameter and micro-batch of FSDP2's copies into and out of its collectives."""
    a_step = 1.0 / x.grad_accum
    kept = (x.sharding < ZERO2) | (x.marks_last > 0)
    gathers = np.where(x.sharding >= ZERO3, 2.0, np.where(kept, a_step, 1.0))
    reductions = np.where(x.sharding >= ZERO2, 1.0, a_step)
    return gathers * kernels.GATHER_COPY + reductions * kernels.REDUCTION_COPY


def _never_repeated(x: Inputs) -> Number:
    """Share of a layer's products that full checkpointing leaves out.

    torch's checkpoint ends before the last product, unless dropout or a cast to 8 bits reads its output (759 products
    in a step instead of 787, h200_fp8_202611.md).
    """
    last = x.hidden * x.ffn / np.maximum(x.layer_matrix, 1.0)
    stops = x.written_out * (x.dropout == 0) * (1.0 - x.compiled) * (x.fp8_cast_bytes == 0) * (x.experts == 0)
    return stops * last


def _fp8_cast_bytes(x: Inputs, tokens: Number, full: Number) -> Number:
    """Bytes of one layer's casts in plain PyTorch; a mixture's experts stay in 16 bits."""
    linear = np.where(x.experts > 0, 0.0, 1.0)
    up = linear * (x.mlp_matrices - 1.0)
    read = (3.0 + up) * x.hidden + (x.query + linear * x.ffn) / x.tensor
    written = (1.0 + linear) * x.hidden + (x.query + 2.0 * x.kv + up * x.ffn) / x.tensor
    weights = (x.layer_parameters - x.expert_parameters) / x.tensor
    return x.fp8_cast_bytes * ((2.0 + full) * (tokens * read + weights) + 2.0 * tokens * written)


def _host_seconds(x: Inputs, full: Number) -> Number:
    c = x.coefficients
    llama = _host_of_layer(x)
    compiled = np.where(x.compiled > 0, kernels.COMPILED_HOST, 1.0)
    # Recomputing costs the host as much again: 83 against 40 ms a step of Llama 410M (H200, torch 2.11, 2026-11-21).
    dtensor = np.where((x.tensor > 1) & (x.fused_kernels == 0), kernels.DTENSOR_HOST, 1.0)
    fsdp = np.where((x.sharding >= ZERO2) & (x.data * x.context > 1), kernels.FSDP_HOST, 0.0)
    fp8 = np.where((x.fp8_cast_bytes > 0) & (x.compiled == 0), kernels.FP8_HOST, 1.0)
    per_layer = c.host_s_per_layer * (llama * compiled * dtensor * fp8 * (1.0 + full) + fsdp)
    if np.any(x.adapter_rank > 0):
        per_layer = per_layer * host_factor(x, full)
    if np.any(x.frozen_layers > 0):
        per_layer = per_layer * (1.0 + 2.0 * live_share(x)) / 3.0
    collectives = np.where(x.tensor > 1, (4.0 + 2.0 * full) * kernels.HOST_S_PER_COLLECTIVE, 0.0)
    # Times the stages, because a stage gets its share of this sum.
    ends = np.where(x.layers > 0, kernels.END_LAYERS, 0.0) * x.pipeline * c.host_s_per_layer
    return x.layers * (per_layer + collectives) + ends


def _late_seconds(x: Inputs, full: Number) -> Number:
    """Least time of the layers' tensor collectives where the pipeline's stages are on several nodes."""
    outside = (x.tensor > 1) & (x.pipeline > 1) & (x.nodes > 1)
    return np.where(outside, x.layers * (4.0 + 2.0 * full) * x.tensor * x.coefficients.pipeline_hop_s, 0.0)


def _host_of_layer(x: Inputs) -> Number:
    return _sublayers(x) * np.where((x.llama_like > 0) & (x.fused_kernels == 0), kernels.LLAMA_HOST, 1.0)


def _sublayers(x: Inputs) -> Number:
    """Attentions and feed-forward blocks of a layer over those of a plain one."""
    return x.sublayers / USUAL_SUBLAYERS


def _attention_seconds(x: Inputs, tokens: Number, full: Number) -> Number:
    # T5's mask is its bias.
    masked = (x.written_out > 0) & (((x.compiled > 0) & (x.masks_compiled > 0)) | (x.t5_like > 0))
    fused = (x.flash > 0) & np.logical_not(scores_by_compiler(x) | grouped_in_32_bits(x))
    products = 4.0 * tokens * x.keys * x.query / x.tensor
    scores = tokens * x.keys * x.heads / x.tensor
    flash = _flash_seconds(x, products, scores, full, masked)
    if np.any(x.t5_like > 0):
        byte_per_s = x.memory_byte_per_s * kernels.MEMORY_EFFICIENCY
        flash = flash + x.t5_like * kernels.BIAS_GRADIENT * x.element_bytes * scores / byte_per_s
    if np.any(x.windowed > 0):
        # A kernel with a window leaves out the scores beyond it; a mask computes all.
        beside = np.where(
            masks_windows(x), _flash_seconds(x, products, scores, full, x.windowed > 0), x.window_scores * flash
        )
        flash = x.windowed * beside + (1.0 - x.windowed) * flash
    return np.where(fused, flash, _unfused_seconds(x, products, scores))


def _flash_seconds(x: Inputs, products: Number, scores: Number, full: Number, masked: Flag) -> Number:
    """Seconds of one layer's fused attention: 3.5 forward passes in all (arXiv:2307.08691, 3.1)."""
    halved = (x.causal > 0) & np.logical_not(masked)
    computed = np.where(halved, 0.5, 1.0)
    half_length = np.where(halved, kernels.CAUSAL_HALF_LENGTH, kernels.HALF_LENGTH)
    half_length = half_length * np.where(x.element_bytes > 2.0, kernels.HALF_LENGTH_32_BIT, 1.0)
    head = np.maximum(x.query, 1.0) / np.maximum(x.heads, 1.0)
    # The kernels of a context ring see a rank's part of the sequence.
    shape = (
        (1.0 + half_length * x.context / x.keys) * (1.0 + kernels.HALF_HEAD / head) / (1.0 + kernels.HALF_HEAD / 128.0)
    )
    shape = shape * np.where(masked, kernels.MASKED_ATTENTION, 1.0)
    seconds = (3.5 + full) * products * shape / (x.attention_flop_per_s * x.coefficients.attention_efficiency)
    forward, backward = kernels.ATTENTION_DROPOUT
    drawn = x.written_out * x.dropout * scores * (forward * (1.0 + full) + backward)
    return computed * (seconds + drawn / x.fp32_flop_per_s)


def _unfused_seconds(x: Inputs, products: Number, scores: Number) -> Number:
    c = x.coefficients
    again = np.where(x.checkpointing == NONE, 0.0, 1.0)
    written, compiled = x.written_out > 0, (x.written_out > 0) & (x.compiled > 0)
    forward, backward = (
        np.where(compiled, by_compiler, np.where(written, np.where(x.element_bytes > 2.0, wide, narrow), fused))
        for by_compiler, wide, narrow, fused in zip(
            kernels.COMPILED_SCORES,
            kernels.WRITTEN_SCORES_32_BIT,
            kernels.WRITTEN_SCORES,
            kernels.FUSED_SCORES,
            strict=True,
        )
    )
    if np.any((x.soft_cap > 0) | (x.sinks > 0)):
        (capped, again_capped), (joined, again_joined) = kernels.SOFT_CAP, kernels.SINKS
        forward = forward + x.written_out * (x.soft_cap * capped + x.sinks * joined)
        backward = backward + x.written_out * (x.soft_cap * again_capped + x.sinks * again_joined)
    score_bytes = scores * x.element_bytes * (forward * (1.0 + again) + backward) * c.elementwise_traffic
    seconds = (3.0 + again) * products / (x.peak_flop_per_s * c.matmul_efficiency)
    seconds = seconds + score_bytes / (x.memory_byte_per_s * kernels.MEMORY_EFFICIENCY)
    # A third of the compiler's products run in 32 bits.
    return seconds + np.where(compiled, products / (kernels.FP32_BATCHED * x.fp32_flop_per_s), 0.0)


def _layer_traffic(x: Inputs) -> Number:
    """Bytes a token of one layer's element-wise kernels: forward, backward and recomputation."""
    forward, backward = _pass_traffic(x, 0), _pass_traffic(x, 1)
    return forward * np.where(x.checkpointing == NONE, 1.0, 2.0) + backward


def _pass_traffic(x: Inputs, index: Literal[0, 1]) -> Number:
    element, residual = x.element_bytes, residual_bytes(x)
    llama, compiled = x.llama_like > 0, x.compiled > 0
    by_hand = (x.fused_kernels == 0) & np.logical_not(compiled)

    norms_by_hand = by_hand & (x.fused_norms == 0)
    written_norm = np.where(residual < 4.0, kernels.WRITTEN_NORM_16_BIT[index], kernels.WRITTEN_NORM[index])
    norm = np.where((llama | (x.t5_like > 0)) & norms_by_hand, written_norm, kernels.NORM[index])
    norm = np.where(compiled, kernels.COMPILED_NORM[index], norm)
    sums = np.where(compiled, kernels.COMPILED_RESIDUAL[index], kernels.RESIDUAL[index])
    dropout = x.dropout * np.where(by_hand, kernels.DROPOUT[index], kernels.FUSED_DROPOUT[index])
    # Each product that reads a wider residual casts it and its gradient; a compiler casts once.
    readers = np.where(llama, kernels.LLAMA_CASTS, kernels.CASTS)
    casts = readers * (element + residual) * (1.0 + index) + index * 3.0 * residual * (readers - 2.0)
    casts = np.where(residual > element, np.where(compiled, element + residual, casts), 0.0)
    stream = residual * (x.norms * norm + 2.0 * sums) + 2.0 * element * dropout + casts

    written_rotary = np.where(element < 4.0, kernels.WRITTEN_ROTARY, kernels.WRITTEN_ROTARY_32_BIT)
    rotary_by_hand = by_hand & (x.fused_rotary == 0)
    rotary = np.where(rotary_by_hand, written_rotary, kernels.FUSED_ROTARY * element) * x.llama_like * (1.0 - x.t5_like)
    swiglu = np.where(by_hand, kernels.SWIGLU[index], kernels.FUSED_SWIGLU[index]) * element
    gelu = np.where(
        by_hand & (x.written_out > 0) & (x.causal > 0), kernels.WRITTEN_GELU[index], kernels.GELU[index] * element
    )
    inner = np.where(llama, swiglu, gelu)
    if np.any(x.t5_like > 0):
        # T5 drops within the block, and widens the second product's input to its weight's type (modeling_t5.py, wo).
        widened = np.where((x.autocast > 0) & np.logical_not(computes_narrow(x)), 2.0 * (element + 4.0), 0.0)
        gate = np.where(llama & by_hand, kernels.WRITTEN_GELU[index], 0.0)
        inner = inner + x.t5_like * (dropout * element + widened + gate)
    if np.any(x.copies_heads > 0):
        copied = kernels.COPIED_HEADS * (x.query + 2.0 * x.kv) + kernels.SCALED_QUERIES * x.query
        stream = stream + x.copies_heads * by_hand * element * copied / np.maximum(x.hidden, 1.0)
    wide = x.shared_ffn + x.routed_ffn
    quantise = x.quantise_bytes * (2.0 * x.hidden + (x.query + wide) / x.tensor)
    split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)
    if np.any(x.head_norms > 0):
        # Under autocast the kernel reads a widened copy, counted as if written out.
        narrow_norm = np.where(
            norms_by_hand | (by_hand & (residual > element)), kernels.WRITTEN_NORM_16_BIT[index], kernels.NORM[index]
        )
        narrow_norm = np.where(compiled, kernels.COMPILED_NORM[index], narrow_norm)
        rotary = rotary + x.head_norms * element * narrow_norm
    masks = np.where(masks_windows(x), x.windowed * x.seq_len * kernels.MASK[index], 0.0)
    return masks + x.hidden * stream / split + (rotary * (x.query + x.kv) + inner * wide) / x.tensor + quantise


def optimizer_time(x: Inputs) -> Number:
    """Seconds of the optimizer step on the rank's parameters; memory-bound."""
    byte_per_s = x.memory_byte_per_s * kernels.MEMORY_EFFICIENCY
    moved = x.optimizer_traffic_bytes + x.master_bytes + np.where(x.master_bytes > 0, x.weight_bytes, 0.0)
    # DDP copies gradients to its buckets and back.
    copies = np.where((x.sharding == DDP) & (x.data * x.context > 1), 2.0 * x.bucket_bytes, 0.0)
    return updated_parameters(x) * (moved + copies) / byte_per_s
