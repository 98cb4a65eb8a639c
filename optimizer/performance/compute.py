"""FLOPs, traffic and time of computation on one rank.

Each operation has its own cost: matrix products by shape (a share of the dense peak, plus the bytes they move),
attention by kernel, head width and sequence, everything else by the bytes it moves, a kernel by the time it takes to
start. The constants are measured on one H200 (tests/benchmarks/results/h200_ops_202611.md) unless said otherwise; how
much real training differs from them is fitted (calibration.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.memory import stage_parameters, tokens_of_rank
from optimizer.performance.samples import sample_costs, sample_flops
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO1

# Share of the datasheet's memory bandwidth that a large copy reaches: 4.25 of 4.8 TB/s.
MEMORY_EFFICIENCY = 0.885

# Bytes that kernels move at that bandwidth, a byte of the tensor's element: forward, backward.
# LayerNorm, and RMSNorm in one kernel.
NORM = (3.0, 4.3)
# RMSNorm as Hugging Face writes it, a kernel each for square, mean, root and two products: of fp32 (40 and 96 bytes an
# element), and of 16 bits that it widens (57 and 112).
WRITTEN_NORM = (10.0, 24.0)
WRITTEN_NORM_16_BIT = (28.0, 56.0)
COMPILED_NORM = (2.6, 3.5)
# A residual sum; backward, the sum of the two branches' gradients. A compiler joins it to the norm that follows.
RESIDUAL = (3.0, 3.0)
COMPILED_RESIDUAL = (1.5, 1.5)
# Dropout on its own; where it is one kernel with bias and residual, only its mask and its gradient are more.
DROPOUT = (3.4, 2.5)
FUSED_DROPOUT = (0.5, 1.5)
# GELU, and SwiGLU in two kernels or in one.
GELU = (2.5, 3.4)
SWIGLU = (5.4, 9.2)
FUSED_SWIGLU = (3.0, 5.0)
# Rotary positions as written out: negate and join halves, two products and a sum, bytes an element in 16 and 32 bits.
WRITTEN_ROTARY, WRITTEN_ROTARY_32_BIT = 43.0, 55.0
FUSED_ROTARY = 2.5
# Under autocast each linear layer casts its own input (6 bytes), and its gradient back (12 bytes: casts to wider types
# run at half the bandwidth), and the gradients of those that share it are added up.
CASTS = 4.0
LLAMA_CASTS = 5.0
# Unfused attention, bytes of the score matrix a byte of its element. Fused softmax kernels (Megatron-LM): product,
# softmax, dropout with its mask, product forward; the same with gradients backward. Written out with an fp32 softmax:
# 55 and 60 bytes a score.
FUSED_SCORES = (6.5, 9.5)
WRITTEN_SCORES = (27.0, 30.0)
# Compiled cross-entropy moves 12 bytes a 16-bit logit, eager 55.
COMPILED_LOSS = 0.22
# Kernels of a layer's forward pass; twice as many backward.
WRITTEN_KERNELS, FUSED_KERNELS, COMPILED_KERNELS = 40.0, 20.0, 12.0

# Sequence at which flash attention is half as fast as at a very long one: blocks on the diagonal of a causal mask are
# computed in full, and short sequences fill the GPU badly.
CAUSAL_HALF_LENGTH, HALF_LENGTH = 430.0, 160.0
# Head width at which the softmax costs as much as the products: 0.91 of the speed at 64 as at 128.
HALF_HEAD = 17.0

# FLOPs of a convolution a byte of bandwidth: 3x3 and 1x1 convolutions of 64 to 512 channels reach 130 to 380 TFLOP/s.
CONVOLUTION_FLOP_PER_BYTE = 41.0
# Convolutions on CUDA cores, over matrix products there.
FP32_CONVOLUTION = 0.67


# Share of a layer's host time that remains when a compiler launches it in fewer kernels.
COMPILED_HOST = 0.4
# Host time of one collective of tensor ranks: the call, its stream and its events.
HOST_S_PER_COLLECTIVE = 60e-6
# Layers that take the host as long as embedding, head and loss.
HEAD_LAYERS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Seconds of one micro-batch on one rank.

    Attributes:
        layer_matmul, layer_attention, layer_elementwise: of all layers of the model (not of one stage), forward,
            backward and recomputation.
        head: output projection, loss and embedding.
        cast: 16-bit copies of the weights.
        host: least time of the layers, what the host needs to launch them.
    """

    layer_matmul: Number
    layer_attention: Number
    layer_elementwise: Number
    head: Number
    cast: Number
    host: Number


def model_flops_per_sample(x: Inputs) -> Number:
    """Useful FLOPs of one sequence or image, forward and backward, without recomputation.

    A multiply-add counts as two. Causal attention counts half the score matrix (what flash attention computes).
    """
    scores = 4.0 * x.seq_len * x.seq_len * x.query * np.where(x.causal > 0, 0.5, 1.0)
    forward = x.layers * (2.0 * x.layer_matrix * x.seq_len + scores) + 2.0 * x.seq_len * x.hidden * x.vocab
    return 3.0 * forward + sample_flops(x)


def compute(x: Inputs) -> Compute:
    """Seconds of one micro-batch's computation on one rank, by part."""
    c = x.coefficients
    tokens = tokens_of_rank(x)
    element = x.element_bytes
    byte_per_s = x.memory_byte_per_s * MEMORY_EFFICIENCY
    flop_per_s = x.peak_flop_per_s * c.matmul_efficiency
    # Recomputation repeats the forward pass of whole layers (full), or a share of their products (selective).
    full = np.where(x.checkpointing == FULL, 1.0, 0.0)
    repeated = np.where(x.checkpointing == SELECTIVE, x.selective_recompute, full)

    # A product of t x k by k x n: its FLOPs, and the bytes of its three sides.
    widths = 3.0 * x.hidden + (2.0 * x.query + 2.0 * x.kv + x.mlp_matrices * x.experts_used * x.ffn) / x.tensor
    volume = 2.0 * tokens * x.layer_matrix / x.tensor
    sides = element * (x.layer_parameters / x.tensor + tokens * widths)
    matmul = x.layers * (3.0 + repeated) * (volume / flop_per_s + c.matmul_traffic * sides / byte_per_s)
    samples = sample_costs(x)
    convolution_flop_per_s = 1.0 / (
        1.0 / (flop_per_s * x.convolution) + 1.0 / (CONVOLUTION_FLOP_PER_BYTE * x.memory_byte_per_s)
    )
    in_samples = (
        samples.product_flops / flop_per_s
        + samples.convolution_flops / convolution_flop_per_s
        + c.matmul_traffic * samples.product_bytes / byte_per_s
    )

    attention = x.layers * _attention_seconds(x, tokens, full) + samples.attention_flops / (
        x.attention_flop_per_s * c.attention_efficiency
    )

    traffic = x.layers * tokens * _layer_traffic(x)
    kernels = np.where(x.compiled > 0, COMPILED_KERNELS, np.where(x.written_out > 0, WRITTEN_KERNELS, FUSED_KERNELS))
    starts = x.layers * kernels * (3.0 + full) * c.kernel_s
    elementwise = (traffic + samples.traffic_bytes) * c.elementwise_traffic / byte_per_s + starts

    logits = x.vocab / x.tensor
    head_sides = element * (x.hidden * logits + tokens * (x.hidden + logits))
    head_flop_per_s = x.head_flop_per_s * c.matmul_efficiency
    head_products = 3.0 * (
        2.0 * tokens * x.hidden * logits / head_flop_per_s + c.matmul_traffic * head_sides / byte_per_s
    )
    loss = tokens * logits * x.loss_traffic_bytes * np.where(x.compiled > 0, COMPILED_LOSS, 1.0)
    head = head_products + (loss + tokens * 6.0 * x.hidden * x.residual_bytes) / byte_per_s
    cast = np.where(x.cast_bytes > 0, stage_parameters(x) * (4.0 + x.cast_bytes) / byte_per_s, 0.0)

    # Recomputing costs the host as much again: 83 against 40 ms a step of Llama 410M (H200, torch 2.11, 2026-11-21).
    calls = np.where(x.tensor > 1, 4.0 + 2.0 * full, 0.0)
    per_layer = c.host_s_per_layer * (1.0 + full) * np.where(x.compiled > 0, COMPILED_HOST, 1.0)
    head_layers = np.where(x.layers > 0, HEAD_LAYERS, 0.0) * x.pipeline
    host = x.layers * (per_layer + calls * HOST_S_PER_COLLECTIVE) + (head_layers + samples.layers) * c.host_s_per_layer
    return Compute(
        layer_matmul=(matmul + in_samples) * c.overhead,
        layer_attention=attention * c.overhead,
        layer_elementwise=elementwise * c.overhead,
        head=head * c.overhead,
        cast=cast,
        host=host,
    )


def _attention_seconds(x: Inputs, tokens: Number, full: Number) -> Number:
    """Of one layer: flash attention's fused kernel, or two batched products with the scores in memory between them."""
    c = x.coefficients
    scores = 4.0 * tokens * x.seq_len * x.query / x.tensor
    # Flash computes half of a causal score matrix, and recomputes it in the backward pass (3.5 forward passes in all,
    # arXiv:2307.08691, 3.1).
    causal = x.causal > 0
    half_length = np.where(causal, CAUSAL_HALF_LENGTH, HALF_LENGTH) * np.where(x.element_bytes > 2.0, 0.25, 1.0)
    head = np.maximum(x.query, 1.0) / np.maximum(x.heads, 1.0)
    shape = (1.0 + half_length / x.seq_len) * (1.0 + HALF_HEAD / head) / (1.0 + HALF_HEAD / 128.0)
    flash_flop_per_s = x.attention_flop_per_s * c.attention_efficiency
    flash = (3.5 + full) * scores * np.where(causal, 0.5, 1.0) * shape / flash_flop_per_s

    again = np.where(x.checkpointing == NONE, 0.0, 1.0)  # selective recomputes the scores, too
    forward, backward = (np.where(x.written_out > 0, w, f) for w, f in zip(WRITTEN_SCORES, FUSED_SCORES, strict=True))
    score_bytes = tokens * x.seq_len * x.heads / x.tensor * x.element_bytes * (forward * (1.0 + again) + backward)
    unfused = (3.0 + again) * scores / (x.peak_flop_per_s * c.matmul_efficiency) + (
        score_bytes * c.elementwise_traffic / (x.memory_byte_per_s * MEMORY_EFFICIENCY)
    )
    return np.where(x.flash > 0, flash, unfused)


def _layer_traffic(x: Inputs) -> Number:
    """Bytes a token that one layer's element-wise kernels move: forward, backward and recomputation."""
    element, residual = x.element_bytes, x.residual_bytes
    llama, compiled, written = x.llama_like > 0, x.compiled > 0, x.written_out > 0
    wide = residual > element
    llama_casts = np.where(llama, LLAMA_CASTS, CASTS)
    total: list[Number] = []
    for index in (0, 1):  # forward, backward
        in_16_bits = residual < 4.0
        by_hand = np.where(in_16_bits, WRITTEN_NORM_16_BIT[index], WRITTEN_NORM[index])
        norm = np.where(llama & written, by_hand, NORM[index])
        norm = np.where(compiled, COMPILED_NORM[index], norm)
        sums = np.where(compiled, COMPILED_RESIDUAL[index], RESIDUAL[index])
        dropout = np.where(written & ~compiled, DROPOUT[index], FUSED_DROPOUT[index]) * x.dropout
        stream = 2.0 * (residual * (norm + sums) + element * dropout)
        cast = llama_casts * (element + residual) * (1.0, 2.0)[index] + (0.0, 3.0)[index] * residual * (
            llama_casts - 2.0
        )
        stream = stream + np.where(wide, np.where(compiled, element + residual, cast), 0.0)
        rotary = np.where(element < 4.0, WRITTEN_ROTARY, WRITTEN_ROTARY_32_BIT)
        rotary = np.where(compiled | ~written, FUSED_ROTARY * element, rotary) * llama * (x.query + x.kv)
        swiglu = np.where(compiled | ~written, FUSED_SWIGLU[index], SWIGLU[index])
        inner = np.where(llama, swiglu, GELU[index]) * element * x.ffn * x.experts_used
        quantise = x.quantise_bytes * (2.0 * x.hidden + (x.query + x.ffn * x.experts_used) / x.tensor)
        split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)
        total.append(x.hidden * stream / split + (rotary + inner) / x.tensor + quantise)
    forward, backward = total
    again = np.where(x.checkpointing == NONE, 0.0, 1.0)
    return forward * (1.0 + again) + backward


def optimizer_time(x: Inputs) -> Number:
    """Seconds of the optimizer step, memory-bound, on the rank's share of the parameters."""
    shards = np.where(x.sharding >= ZERO1, np.maximum(x.data, 1.0), 1.0)
    byte_per_s = x.memory_byte_per_s * MEMORY_EFFICIENCY
    moved = x.optimizer_traffic_bytes + x.master_bytes + np.where(x.master_bytes > 0, x.weight_bytes, 0.0)
    # DDP copies gradients to its buckets and back, a read and a write each way.
    copies = np.where((x.sharding == DDP) & (x.data > 1), 2.0 * x.bucket_bytes, 0.0)
    return stage_parameters(x) / shards * (moved + copies) / byte_per_s
