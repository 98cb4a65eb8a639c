"""FLOPs, traffic and time of computation on one rank.

Time is matrix products at a fitted share of the dense peak, plus attention at another, plus everything else at a
fitted share of the memory bandwidth; and never less than the host needs to launch it all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.memory import stage_parameters, tokens_of_rank
from optimizer.performance.samples import sample_costs, sample_flops
from optimizer.performance.types import FULL, NONE, SELECTIVE, ZERO1

# Share of the datasheet's memory bandwidth that a large copy reaches: 4.3 of 4.8 TB/s on H200 (torch 2.11, bytes read
# plus bytes written, measured 2026-10-28 and 2026-11-04).
MEMORY_EFFICIENCY = 0.9


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
    flop_per_s = x.peak_flop_per_s * c.matmul_efficiency
    attention_flop_per_s = x.attention_flop_per_s * c.attention_efficiency
    byte_per_s = x.memory_byte_per_s * MEMORY_EFFICIENCY
    element = x.element_bytes

    # Passes over a layer: forward, backward (two products for each one), and recomputation.
    recompute = np.where(x.checkpointing == FULL, 1.0, 0.0)
    passes = 3.0 + np.where(x.checkpointing == SELECTIVE, x.selective_recompute, recompute)

    # A product of t x k by k x n takes 2 (t k n + w (k n + t n + t k)) FLOP times: its volume, and its surface times
    # the width w at which a side costs as much again. So small matrices, and slices of them, are less efficient.
    widths = 3.0 * x.hidden + (2.0 * x.query + 2.0 * x.kv + x.mlp_matrices * x.experts_used * x.ffn) / x.tensor
    volume = tokens * x.layer_matrix / x.tensor
    surface = x.layer_parameters / x.tensor + tokens * widths
    matmul = x.layers * passes * 2.0 * (volume + c.matmul_half_width * surface) / flop_per_s
    samples = sample_costs(x)

    # Attention: flash computes half of a causal score matrix, and recomputes it in the backward pass (3.5 forward
    # passes in all, arXiv:2307.08691, 3.1); unfused computes all of it and writes it several times.
    scores = 4.0 * tokens * x.seq_len * x.query / x.tensor
    half = np.where((x.causal > 0) & (x.flash > 0), 0.5, 1.0)
    selective_again = np.where((x.checkpointing == SELECTIVE) & (x.flash == 0), 1.0, 0.0)
    attention_passes = np.where(x.flash > 0, 3.5, 3.0) + recompute + selective_again
    score_elements = tokens * x.seq_len * x.heads / x.tensor
    score_traffic = (1.0 - x.flash) * score_elements * element * SCORE_PASSES * (attention_passes / 3.0)
    attention = x.layers * (
        attention_passes * scores * half / attention_flop_per_s + score_traffic * c.elementwise_traffic / byte_per_s
    )

    # Element-wise work: bytes moved forward a token; the backward pass moves twice as many. Passes over the residual
    # stream: two norms, two residual sums (3 each), two dropouts (2 and a mask), casts to 16 bit where it is wider.
    fused = np.where(x.compiled > 0, COMPILED_TRAFFIC, 1.0)
    split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)
    norm = np.where(x.llama_like > 0, RMS_NORM_PASSES, LAYER_NORM_PASSES)
    casts = np.where(x.residual_bytes > element, 2.0 * 1.5, 0.0)
    stream = x.hidden * x.residual_bytes * (2.0 * norm + 6.0 + 5.0 * x.dropout + casts) / split
    activation = np.where(x.llama_like > 0, 5.0, 2.0)
    inner = element * activation * x.ffn * x.experts_used / x.tensor
    rotary = element * ROTARY_PASSES * x.llama_like * (x.query + x.kv) / x.tensor
    elementwise_passes = 3.0 + np.where(x.checkpointing == NONE, 0.0, 1.0)
    traffic = x.layers * tokens * elementwise_passes * (stream + inner + rotary) * fused
    elementwise = (traffic + samples.traffic_bytes) * c.elementwise_traffic / byte_per_s

    logits = x.vocab / x.tensor
    head_surface = x.hidden * logits + tokens * (x.hidden + logits)
    head_flops = 6.0 * (tokens * x.hidden * logits + c.matmul_half_width * head_surface)
    head_traffic = tokens * (x.vocab / x.tensor * 2.0 * x.loss_bytes + 6.0 * x.hidden * x.residual_bytes)
    head = head_flops / (x.attention_flop_per_s * c.matmul_efficiency) + head_traffic / byte_per_s
    cast = np.where(x.cast_bytes > 0, stage_parameters(x) * (4.0 + x.cast_bytes) / byte_per_s, 0.0)

    # Recomputing costs the host as much again: 83 against 40 ms a step of Llama 410M (H200, torch 2.11, 2026-11-21).
    host = (x.layers * (1.0 + recompute) + samples.layers) * c.host_s_per_layer
    return Compute(
        layer_matmul=matmul + samples.product_flops / flop_per_s,
        layer_attention=attention + samples.attention_flops / attention_flop_per_s,
        layer_elementwise=elementwise,
        head=head,
        cast=cast,
        host=host,
    )


# Reads and writes of the unfused score matrix in a forward and a backward pass, in elements: forward scale, mask,
# softmax, dropout and two products (10), backward the same with gradients (20).
SCORE_PASSES = 20.0
# Reads and writes of a norm's input and output, forward: LayerNorm is one kernel; RMSNorm as Hugging Face writes it is
# a square, a mean, a product with the root and one with the weight.
LAYER_NORM_PASSES = 2.0
RMS_NORM_PASSES = 7.0
# Rotary positions as Hugging Face writes them: negate and join halves, two products and a sum.
ROTARY_PASSES = 10.0
# Share of the element-wise traffic that remains when a compiler fuses chains of it into one kernel each: a norm and a
# sum that were 5 passes are 3.
COMPILED_TRAFFIC = 0.6


def optimizer_time(x: Inputs) -> Number:
    """Seconds of the optimizer step, memory-bound, on the rank's share of the parameters."""
    shards = np.where(x.sharding >= ZERO1, np.maximum(x.data, 1.0), 1.0)
    byte_per_s = x.memory_byte_per_s * MEMORY_EFFICIENCY
    moved = x.optimizer_traffic_bytes + x.master_bytes + np.where(x.master_bytes > 0, x.weight_bytes, 0.0)
    return stage_parameters(x) / shards * moved / byte_per_s
