"""Costs of a mixture of experts beyond a dense layer's: routing, copies of tokens, small products.

Counted in the sources named below; only kernels.GROUPED_PRODUCT was read off a measured mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.activations import EXPERT_CAPACITY
from optimizer.performance.inputs import Inputs
from optimizer.performance.stage import experts_in_32_bits, tokens_of_rank
from optimizer.performance.types import FULL, NONE, Number

# Products are computed in tiles of 128 rows, each expert's last half empty on average
# (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication, tile quantization).
TILE_ROWS = 128.0

# Passes over the copied tokens, (of the residual's width, of the products'), forward and backward: Hugging Face's
# grouped_mm_experts_forward (transformers 5.23, integrations/moe.py).
WRITTEN_PASSES = ((6.5, 1.0), (12.0, 2.0))
# Passes of Hugging Face's loop over the experts (models/mixtral/modeling_mixtral.py, MixtralExperts).
LOOP_PASSES = ((7.0, 2.0), (13.0, 3.0))
# Zeros that each turn's gradient is summed into, and its sum with the others'.
LOOP_ZEROS = 4.0
# Fused permute and unpermute (Megatron-LM, megatron/core/transformer/moe/moe_utils.py).
FUSED_PASSES = ((0.0, 3.5), (0.0, 5.5))
# Router: softmax in 32 bits, top k, mask and gradients, bytes a token and expert.
ROUTER_BYTES = (40.0, 40.0)

# Forward kernels of one turn of the loop; twice as many backward. Fused: megatron/core/transformer/moe/experts.py,
# SequentialMLP.
WRITTEN_LOOP_KERNELS, FUSED_LOOP_KERNELS = 14.0, 6.0
# Host time of one turn, layers (1.33 ms a layer of Hugging Face's Llama, fitted): forward the GPU waits 0.24 ms,
# backward it is 0.5 ms beside its work. One layer alone of 8192 tokens, width 1024, 8 experts of 3584, two a token,
# autocast: 3.3 ms forward, 6.5 backward; host 4.0, kernels 7.1 (H200, torch 2.11, 2026-11-21).
LOOP_WAIT_LAYERS, LOOP_HOST_LAYERS = 0.18, 0.38
# Each turn of the loop writes its gradient into zeros of all experts' weights (one pass) and adds them (three).
SLICE_PASSES = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Costs of all layers beyond a dense layer's, one micro-batch on one rank; 0 without experts.

    Attributes:
        host_layers, wait_layers: host time beside the GPU's work and while the GPU waits, in layers.
    """

    flop_s: Number = 0.0
    traffic_bytes: Number = 0.0
    starts: Number = 0.0
    host_layers: Number = 0.0
    wait_layers: Number = 0.0


def experts(x: Inputs) -> Experts:
    """Compute the costs of each configuration's experts."""
    if not np.any(x.experts > 0):
        return Experts()
    c = x.coefficients
    mixture = np.where(x.experts > 0, 1.0, 0.0)
    written = x.fused_kernels == 0
    loop = mixture * (x.grouped_experts == 0)
    again = np.where(x.checkpointing == NONE, 0.0, 1.0)
    full = np.where(x.checkpointing == FULL, 1.0, 0.0)
    narrow = x.element_bytes
    element = np.where(experts_in_32_bits(x), 4.0, narrow)

    local = x.experts / x.expert
    capacity = np.where(x.expert > 1, EXPERT_CAPACITY, 1.0)
    tokens = tokens_of_rank(x)
    rows = tokens * x.experts_used * capacity
    matrix = x.mlp_matrices * x.hidden * x.ffn / x.tensor  # of one expert

    # Less the products counted as a dense layer's.
    dense = 2.0 * tokens * x.experts_used * matrix / x.peak_flop_per_s
    tiled = 2.0 * (rows + local * TILE_ROWS / 2.0) * matrix
    grouped = np.where(written & (loop == 0), kernels.GROUPED_PRODUCT, 1.0)
    tiled = tiled / np.where(experts_in_32_bits(x), x.fp32_flop_per_s, x.expert_flop_per_s * grouped)
    passes = 3.0 + np.where(x.checkpointing == NONE, 0.0, np.where(full > 0, 1.0, x.selective_recompute))
    flop_s = x.mixture_layers * passes * (tiled - dense) / c.matmul_efficiency
    sides = local * matrix + rows * (2.0 * x.hidden + x.mlp_matrices * x.ffn / x.tensor)
    widened = passes * c.matmul_traffic * sides * (element - narrow)

    traffic: Number = 0.0
    for index, times in ((0, 1.0 + again), (1, 1.0)):
        wide, own = (
            np.where(written, np.where(loop > 0, looped, grouped), fused)
            for looped, grouped, fused in zip(
                LOOP_PASSES[index], WRITTEN_PASSES[index], FUSED_PASSES[index], strict=True
            )
        )
        gate = np.where(written, kernels.SWIGLU[index], kernels.FUSED_SWIGLU[index]) * x.ffn / x.tensor
        moved = rows * (x.hidden * (wide * x.residual_bytes + own * element) + gate * (element - narrow))
        traffic = traffic + times * (moved + tokens * x.experts * ROUTER_BYTES[index])
    by_hand = loop * written
    weights = np.where(x.autocast > 0, x.weight_bytes, narrow)
    traffic = traffic + by_hand * local * LOOP_ZEROS * tokens * x.hidden * x.residual_bytes
    traffic = traffic + by_hand * local * SLICE_PASSES * local * matrix * weights

    turns = loop * x.mixture_layers * local
    fused_host = (1.0 + full / 3.0) * FUSED_LOOP_KERNELS / kernels.FUSED_KERNELS
    return Experts(
        flop_s=flop_s,
        traffic_bytes=x.mixture_layers * (traffic * c.elementwise_traffic + widened),
        starts=turns * np.where(written, WRITTEN_LOOP_KERNELS, FUSED_LOOP_KERNELS) * (3.0 + full),
        host_layers=turns * np.where(written, LOOP_HOST_LAYERS, fused_host),
        wait_layers=turns * np.where(written, LOOP_WAIT_LAYERS * (1.0 + full), 0.0),
    )
