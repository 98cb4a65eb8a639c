"""Memory of the fullest rank, in bytes by part (docs/estimator.md).

The peak is at the loss or at the end of the backward pass, on the first pipeline stage or the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance.activations import activation_bytes, logits_bytes, micro_batches_in_flight
from optimizer.performance.fine_tuning import widened_bytes
from optimizer.performance.fsdp import backward_bytes, in_fsdp2, kept_reduction_bytes, loss_parameters_bytes
from optimizer.performance.gradient_compression import compresses, held_bytes
from optimizer.performance.inputs import Inputs
from optimizer.performance.stage import (
    experts_in_32_bits,
    layer_parameters_of_rank,
    mixture_layers_of_stage,
    stage_parameters,
    unshared_stage_parameters,
)
from optimizer.performance.types import DDP, FULL, ZERO1, ZERO2, ZERO3, Number

# ZeRO-3 holds the layer in use and the next one.
GATHERED_LAYERS = 2.0
# cuBLAS (CUBLAS_WORKSPACE_CONFIG): 0.1 GiB beyond the equations in the smallest runs and those of 100 GiB (GPT-2 to
# Llama 7B, H200, torch 2.11, 2026-11-21).
WORKSPACE_BYTES = 0.1 * GIB

# Outside the allocator. CUDA context: 0.75 GiB (H200, torch 2.11, 2026-11-21). NCCL: 0.69 GB on 4 A100s
# (https://github.com/NVIDIA/nccl/issues/964), for each group of ranks
# (https://github.com/NVIDIA/nccl/issues/986), and 3.28 GB more once 8 H100s exchange all to all
# (https://github.com/NVIDIA/nccl/issues/1685, 2025-04-16).
CONTEXT_BYTES = 0.75 * GIB
NCCL_BYTES = 0.69e9
ALL_TO_ALL_BYTES_PER_PEER = 3.28e9 / 7
# Reserved over allocated: 0.1 to 6% in runs above 125 GiB on H200 (torch 2.11, 2026-11-21, data/measured_runs.csv),
# with the expandable segments that bootstrap/agent sets (PYTORCH_CUDA_ALLOC_CONF,
# https://pytorch.org/docs/stable/notes/cuda.html).
FRAGMENTATION = 0.05


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes by part at the peak, those that only other streams can use (``streams``), and NCCL's buffers."""

    peak: dict[str, Number]
    streams: Number
    nccl: Number


@dataclass(frozen=True, slots=True)
class _Moments:
    weights: Number
    state: Number
    buckets: Number
    early: Number
    saved: Number
    working: Number
    logits: Number
    cast: Number
    at_loss: Number
    all_gradients: Number
    last: Number
    unsharded: Number  # parameters at the end of the backward pass

    reduced: Number  # gradients that FSDP2 makes anew on its own stream

    @property
    def at_end(self) -> Number:
        return self.all_gradients + self.last + self.unsharded

    @property
    def streams(self) -> Number:
        """Bytes that the allocator holds beyond the peak.

        A block belongs to the CUDA stream that asked for it (https://pytorch.org/docs/stable/notes/cuda.html, memory
        management). FSDP2 makes reduced gradients on the stream of its reductions, which cannot take what the backward
        pass frees of activations. Where no room is left, the allocator returns all free blocks to the driver in each
        step: 0.60 s for 0.36 (8B, two H100, tests/benchmarks/results/trainer_2xh100_202611.md).
        """
        return np.maximum(self.at_loss + self.reduced - np.maximum(self.at_loss, self.at_end), 0.0)


def memory(x: Inputs) -> MemoryParts:
    """Compute the memory of each configuration."""
    m = _moments(x)
    loss_peaks = m.at_loss >= m.at_end
    return MemoryParts(
        peak={
            "weights": m.weights + np.where(loss_peaks, m.cast, m.unsharded),
            "gradients": np.where(loss_peaks, m.early, m.all_gradients),
            "optimizer_state": m.state,
            "activations": np.where(loss_peaks, m.saved + np.maximum(m.working - m.logits, 0.0), m.last),
            "logits": np.where(loss_peaks, m.logits, 0.0),
            "communication": m.buckets,
            "workspace": WORKSPACE_BYTES + widened_bytes(x),
        },
        streams=m.streams,
        nccl=_nccl_bytes(x),
    )


def needed_bytes(x: Inputs) -> tuple[Number, Number, Number]:
    """Sum of ``MemoryParts.peak``, ``streams`` and ``nccl``: for a search that needs no breakdown."""
    m = _moments(x)
    peak = m.weights + m.state + m.buckets + np.maximum(m.at_loss, m.at_end)
    return peak + WORKSPACE_BYTES + widened_bytes(x), m.streams, _nccl_bytes(x)


def _moments(x: Inputs) -> _Moments:
    held = stage_parameters(x)
    ranks = x.data * x.context
    several = ranks > 1
    sharded = unshared_stage_parameters(x) / ranks
    zero1, zero2, zero3 = x.sharding >= ZERO1, x.sharding >= ZERO2, x.sharding >= ZERO3
    layer = layer_parameters_of_rank(x)

    # PyTorch's ZeRO-2 is FSDP that gathers all 16-bit weights for a pass (SHARD_GRAD_OP).
    keeps_whole = (x.sharding == ZERO1) & (x.fsdp2 == ZERO1)  # FSDP2 that keeps parameters and gradients whole
    gathers_all = ((x.sharding == ZERO2) | keeps_whole) & (x.master_bytes == 0) & several
    weights = np.where(zero3 | gathers_all, sharded, held) * x.weight_bytes
    state = np.where(zero1, sharded, held) * (x.optimizer_state_bytes + x.master_bytes)
    gradients = np.where(zero2, sharded, held) * x.gradient_bytes
    reducing = np.where(zero2, layer * x.gradient_bytes, 0.0)
    buckets = np.where((x.sharding <= ZERO1) & np.logical_not(keeps_whole) & several, held * x.bucket_bytes, 0.0)
    if compresses(x):
        buckets = np.where(several, buckets + held_bytes(x, held), 0.0)
    gathered = GATHERED_LAYERS * layer * (x.element_bytes + x.cached_bytes)
    saved, working, layer_activations = activation_bytes(x)
    first, last = micro_batches_in_flight(x)
    logits = logits_bytes(x)
    # Recomputed layers make autocast's copies again, before or after the logits' gradient exists.
    head = np.minimum(x.vocab * x.hidden / x.tensor, held)
    held_narrow = held
    kept = np.where(x.checkpointing == FULL, np.maximum((held - head) * x.cast_bytes - logits / 6.0, 0.0), 0.0)
    if np.any(x.experts > 0):  # no copy of 32-bit weights
        wide = np.where(
            experts_in_32_bits(x), mixture_layers_of_stage(x) * x.expert_parameters / x.expert / x.tensor, 0.0
        )
        kept = np.where(x.checkpointing == FULL, np.maximum(kept - wide * x.cast_bytes, 0.0), kept)
        held_narrow = held - wide
    if np.any(x.fp8_cast_bytes > 0):
        # torchao keeps no copy of a layer's weights (h200_fp8_202611.md).
        kept = np.where(x.fp8_cast_bytes > 0, 0.0, kept)
        held_narrow = np.where(x.fp8_cast_bytes > 0, head, held_narrow)
    copied = np.where(x.checkpointing == FULL, head * x.cast_bytes + kept, held_narrow * x.cast_bytes)
    copies = np.where(gathers_all, held * x.element_bytes, copied) + held * x.cached_bytes
    cast = np.where(zero3 & several, gathered, copies)
    # The fuller stage: the first, or the last with its logits.
    last_is_fuller = (last - first) * saved + np.maximum(logits - working, 0.0) >= 0
    logits = np.where(last_is_fuller, logits, 0.0)
    most_saved = saved * np.maximum(first, last)
    saved = saved * np.where(last_is_fuller, last, first)
    early = np.where((x.persistent_gradients > 0) | (x.grad_accum > 1) | (x.pipeline > 1), gradients, 0.0)
    all_gradients, last_activations, unsharded = gradients + reducing, layer_activations, np.zeros(())
    fsdp2 = in_fsdp2(x)
    reduced = np.where((x.fsdp2 > 0) & zero2 & several & (x.grad_accum <= 1), sharded * x.gradient_bytes, 0.0)
    if np.any(fsdp2):
        cast = np.where(fsdp2, loss_parameters_bytes(x) + kept_reduction_bytes(x), cast)
        moment = backward_bytes(x, early=early, saved=most_saved, working=working)
        all_gradients = np.where(fsdp2, moment.gradients, all_gradients)
        last_activations = np.where(fsdp2, moment.activations, last_activations)
        unsharded = np.where(fsdp2, moment.parameters, 0.0)

    return _Moments(
        weights=weights,
        state=state,
        buckets=buckets,
        early=early,
        saved=saved,
        working=working,
        logits=logits,
        cast=cast,
        at_loss=early + saved + np.maximum(logits, working) + cast,
        all_gradients=all_gradients,
        last=last_activations,
        unsharded=unsharded,
        reduced=reduced,
    )


def _nccl_bytes(x: Inputs) -> Number:
    groups = 1.0 * (x.data * x.context > 1) + (x.tensor > 1) + (x.pipeline > 1) + (x.context > 1) + (x.expert > 1)
    peers = np.minimum(x.expert, x.gpus_per_node) - 1.0
    return groups * NCCL_BYTES + peers * ALL_TO_ALL_BYTES_PER_PEER


# Measured peak above the estimate that 19 of 20 rows of a layout stay below (of fewer rows, all), in rows of plain
# PyTorch and the reference trainer on one to four H200 (data/measured_runs.csv, 2026-11-21, and
# tests/benchmarks/results/h200_x2_trainer_202611.csv; a test compares). No layout takes less than all of them together:
# the rows are of one GPU model.
ALL_LAYOUTS = 0.032  # 193 rows: 0.024
DDP_LAYOUTS = 0.035  # 19
SHARDED = ALL_LAYOUTS  # 33 rows: 0.009; ZeRO-1 to ZeRO-3 over data ranks
TENSOR = 0.038  # 5
CONTEXT = ALL_LAYOUTS  # 7 rows: 0.009
EXPERT = ALL_LAYOUTS  # 5 rows: 0.002
CONVOLUTIONAL = 0.079  # 19: cuDNN's workspace
# No measured peak has pipeline stages, fused kernels, or an encoder with a decoder: as far off as the worst above.
UNMEASURED = CONVOLUTIONAL


def margin(x: Inputs) -> Number:
    """95th percentile of a measured peak above the estimated one, as a share of the estimate."""
    splits = ((x.tensor, TENSOR), (x.context, CONTEXT), (x.expert, EXPERT), (x.pipeline, UNMEASURED))
    several = x.data * x.context > 1
    share = np.where(several, np.where(x.sharding == DDP, DDP_LAYOUTS, SHARDED), ALL_LAYOUTS)
    for ranks, own in splits:
        share = np.where(ranks > 1, np.maximum(share, own), share)
    share = np.where(x.convolutions > 0, np.maximum(share, CONVOLUTIONAL), share)
    return np.where((x.fused_kernels > 0) | (x.t5_like > 0), np.maximum(share, UNMEASURED), share)
