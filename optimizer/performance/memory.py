"""Memory of the fullest rank, in bytes by part (docs/estimator.md).

The peak is at the loss or at the end of the backward pass, on the first pipeline stage or the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance.activations import activation_bytes, logits_bytes, micro_batches_in_flight
from optimizer.performance.case import Case
from optimizer.performance.frameworks import MEGATRON
from optimizer.performance.fsdp import Moment, backward_bytes, loss_bytes
from optimizer.performance.types import DDP, FULL, ZERO1, ZERO2, ZERO3, Number

# ZeRO-3 holds the layer in use and the next one.
GATHERED_LAYERS = 2.0
# cuBLAS (CUBLAS_WORKSPACE_CONFIG): 0.1 GiB beyond the equations in the smallest runs and those of 100 GiB (GPT-2 to
# Llama 7B, H200, torch 2.11, 2026-11-21).
WORKSPACE_BYTES = 0.1 * GIB
# Streams of Transformer Engine's grouped products, each with a workspace (get_num_compute_streams of
# transformer_engine/pytorch/cpp_extensions/gemm.py).
GROUPED_STREAMS = 4.0

# Outside the allocator. CUDA context: 0.75 GiB (H200, torch 2.11, 2026-11-21). NCCL: 0.69 GB on 4 A100s
# (https://github.com/NVIDIA/nccl/issues/964), for each group of ranks
# (https://github.com/NVIDIA/nccl/issues/986), and 3.28 GB more once 8 H100s exchange all to all
# (https://github.com/NVIDIA/nccl/issues/1685, 2025-04-16).
CONTEXT_BYTES = 0.75 * GIB
NCCL_BYTES = 0.69e9
ALL_TO_ALL_BYTES_PER_PEER = 3.28e9 / 7
# Larger NVLink domains (GB200 NVL72) exchange by kernels with buffers of their own, not by NCCL's channels to each peer
# (hybridep in the recipes of Megatron-Bridge at v0.4.1).
MEASURED_PEERS = 8.0
# Reserved over allocated: 0.1 to 6% in runs above 125 GiB on H200 (torch 2.11, 2026-11-21, data/measured_runs.csv),
# with the expandable segments that bootstrap/agent sets (PYTORCH_CUDA_ALLOC_CONF,
# https://pytorch.org/docs/stable/notes/cuda.html).
FRAGMENTATION = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Bytes of the peak and its parts, at the loss or at the end of the backward pass.

    Attributes:
        p95: 95th percentile of the bytes that the allocator holds, with those that only other streams can use. A block
            belongs to the CUDA stream that asked for it (https://pytorch.org/docs/stable/notes/cuda.html, memory
            management). FSDP2 makes reduced gradients on the stream of its reductions, which cannot take what the
            backward pass frees of activations. Where no room is left, the allocator returns all free blocks to the
            driver in each step: 0.60 s for 0.36 (8B, two H100, tests/benchmarks/results/trainer_2xh100_202611.md).
        nccl: NCCL's buffers.
    """

    parts: dict[str, Number]
    peak: Number
    p95: Number
    nccl: Number


def memory(x: Case) -> PeakMemory:
    """Compute the memory of each layout."""
    held, sharded, several = x.stage_parameters, x.shard_parameters, x.ranks > 1
    zero1, zero2, zero3 = x.sharding >= ZERO1, x.sharding >= ZERO2, x.sharding >= ZERO3
    # The largest unit that ZeRO gathers is a layer, or a larger embedding.
    table = min(x.table_parameters, float(x.model.embedding_parameters)) / x.tensor
    layer = np.maximum(x.rank_layer_parameters, table)
    # PyTorch's ZeRO-2 is FSDP that gathers all 16-bit weights for a pass (SHARD_GRAD_OP); FSDP2's ZeRO-1 keeps
    # parameters and gradients whole.
    keeps_whole = (x.sharding == ZERO1) & (x.code.fsdp2 == ZERO1)
    gathers_all = ((x.sharding == ZERO2) | keeps_whole) & several & (x.master_bytes == 0)
    gradients = np.where(zero2, sharded, held) * x.gradient_bytes
    reducing = np.where(zero2, layer * x.gradient_bytes, 0.0)
    buckets = np.where((x.sharding <= ZERO1) & np.logical_not(keeps_whole) & several, held * x.bucket_bytes, 0.0)
    kept = activation_bytes(x)
    first, last = micro_batches_in_flight(x)
    logits = logits_bytes(x)
    # Recomputed layers make autocast's copies again, before or after the logits' gradient exists. 32-bit experts have
    # no copy, and torchao keeps none of a layer's weights (h200_fp8_202611.md).
    head = np.minimum(x.table_parameters / x.tensor, held)
    wide = np.where(x.experts_in_32_bits, x.rank_experts, 0.0)
    again = np.maximum((held - head) * x.cast_bytes - logits / 6.0, 0.0)
    again = 0.0 if x.casts_fp8 else np.maximum(again - wide * x.cast_bytes, 0.0)
    narrow = head if x.casts_fp8 else held - wide
    copied = np.where(x.checkpointing == FULL, head * x.cast_bytes + again, narrow * x.cast_bytes)
    copies = np.where(gathers_all, held * x.element, copied) + held * x.cached_bytes
    cast = np.where(zero3 & several, GATHERED_LAYERS * layer * (x.element + x.cached_bytes), copies)
    # The fuller stage: the first, or the last with its logits.
    last_is_fuller = (last - first) * kept.saved + np.maximum(logits - kept.working, 0.0) >= 0
    logits = np.where(last_is_fuller, logits, 0.0)
    saved = kept.saved * np.where(last_is_fuller, last, first)
    early: Number = gradients
    if not x.code.master_bytes:
        early = np.where((x.grad_accum > 1) | (x.pipeline > 1), gradients, 0.0)
    end: Moment = gradients + reducing, kept.layer, 0.0
    reduced: Number = 0.0
    if x.code.fsdp2:
        reduced = np.where(zero2 & several & (x.grad_accum <= 1), sharded * x.gradient_bytes, 0.0)
        if x.model.layers and not x.model.experts:  # spread experts are no part of its units
            most = kept.saved * np.maximum(first, last)
            units = backward_bytes(x, early=early, saved=most, working=kept.working)
            end = tuple(np.where(x.uses_fully_shard, own, other) for own, other in zip(units, end, strict=True))
            cast = np.where(x.uses_fully_shard, loss_bytes(x), cast)
    widened: Number = 0.0
    if x.recipe.tuning.four_bit:  # the largest 4-bit weight
        widened = x.element * x.model.hidden_size * max(x.model.ffn_size, x.query) / x.tensor
    streams = GROUPED_STREAMS if x.model.experts and not x.recipe.loops_experts else 0.0
    fused = (1.0 + streams) * (x.recipe.framework in MEGATRON)
    final, activations, gathered = end
    at_loss, at_end = early + saved + np.maximum(logits, kept.working) + cast, final + activations + gathered
    is_loss, most = at_loss >= at_end, np.maximum(at_loss, at_end)
    weights = np.where(zero3 | gathers_all, sharded, held) * x.weight_bytes
    own_states = np.where(zero1, sharded * np.minimum(x.recipe.optimizer_instances, x.ranks), held)
    optimizer = own_states * (x.optimizer_bytes + x.master_bytes)
    workspace = WORKSPACE_BYTES + widened + fused * x.rates.product_workspace
    peak = weights + optimizer + buckets + most + workspace
    groups = 1.0 * (x.ranks > 1) + (x.tensor > 1) + (x.pipeline > 1) + (x.context > 1) + (x.expert > 1)
    peers = np.minimum(np.minimum(x.expert, x.rates.gpus_per_node), MEASURED_PEERS) - 1.0
    return PeakMemory(
        parts={
            "weights": weights + np.where(is_loss, cast, gathered),
            "gradients": np.where(is_loss, early, final),
            "optimizer_state": optimizer,
            "activations": np.where(is_loss, saved + np.maximum(kept.working - logits, 0.0), activations),
            "logits": np.where(is_loss, logits, 0.0),
            "communication": buckets,
            "workspace": workspace,
        },
        peak=peak,
        # A router that nobody forces to balance fills experts above their mean.
        p95=peak * (1.0 + _margin(x)) + np.maximum(at_loss + reduced - most, 0.0) + saved * kept.uneven,
        nccl=groups * NCCL_BYTES + peers * ALL_TO_ALL_BYTES_PER_PEER,
    )


# Measured peak above the estimate that 19 of 20 rows of a layout stay below (of fewer rows, all), in rows of plain
# PyTorch and the reference trainer on one to four H200 (data/measured_runs.csv, 2026-11-21, and
# tests/benchmarks/results/h200_x2_trainer_202611.csv; a test compares). No layout takes less than all of them together,
# as the rows are of one GPU model: 0.009 of 33 rows with ZeRO and of 7 with context ranks, 0.002 of 5 with experts.
ALL_LAYOUTS = 0.032  # 193 rows: 0.024
DDP_LAYOUTS = 0.035  # 19
TENSOR = 0.038  # 5
CONVOLUTIONAL = 0.079  # 19: cuDNN's workspace
# No measured peak has pipeline stages, fused kernels, or an encoder with a decoder: as far off as the worst above.
UNMEASURED = CONVOLUTIONAL


def _margin(x: Case) -> Number:
    if x.model.convolutions or x.code.fused_kernels or x.is_t5:
        return UNMEASURED
    share = np.where((x.ranks > 1) & (x.sharding == DDP), DDP_LAYOUTS, ALL_LAYOUTS)
    share = np.where(x.tensor > 1, np.maximum(share, TENSOR), share)
    return np.where(x.pipeline > 1, UNMEASURED, share)


def limit_bytes(gpu_memory_bytes: Number, nccl_bytes: Number) -> Number:
    """Bytes that a peak may have of those that the driver shows."""
    return np.maximum((gpu_memory_bytes - CONTEXT_BYTES - nccl_bytes) / (1.0 + FRAGMENTATION), 0.0)
