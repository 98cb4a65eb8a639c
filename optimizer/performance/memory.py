"""Memory of the fullest rank, in bytes by part (docs/estimator.md).

The peak is at the loss or at the end of the backward pass, on the first pipeline stage or the last. Constants without
another source were measured on H200 with torch 2.11 (2026-11-21, data/measured_runs.csv).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance.case import EXPERT_CAPACITY, Case
from optimizer.performance.fine_tuning import adapted_sides
from optimizer.performance.frameworks import MEGATRON, TRAINER
from optimizer.performance.fsdp import Moment, backward_bytes, loss_bytes
from optimizer.performance.operations import operations, traced
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO1, ZERO2, ZERO3, Number
from optimizer.workload.profile.records import Pass

# ZeRO-3 holds the layer in use and the next one.
GATHERED_LAYERS = 2.0
# cuBLAS (CUBLAS_WORKSPACE_CONFIG): 0.1 GiB beyond the equations, from GPT-2 to Llama 7B.
WORKSPACE_BYTES = 0.1 * GIB
# Streams of Transformer Engine's grouped products, each with a workspace (get_num_compute_streams of
# transformer_engine/pytorch/cpp_extensions/gemm.py).
GROUPED_STREAMS = 4.0
# Peak bytes a logit with a compiled loss: 5.9 to 6.6 (GPT-2, Llama 410M, 1B and 3B).
COMPILED_LOSS_BYTES = 6.0
# Megatron's own fused loss, of NeMo's fine-tuning too (golden_values of Megatron-LM's tests, 2026; frameworks.toml).
MEGATRON_FUSED_LOSS_BYTES = 10.0
# A turn's 32-bit log-softmax, its probabilities and their product (bootstrap/trainer/loss.py).
LOSS_TURN_BYTES = 12.0
# Input and output of each convolution, in elements a published activation.
SAVED_PER_ACTIVATION = 2.0
# A ResNet's max pooling of one image: 64 channels of 56 x 56, 8 bytes each.
POOLING_INDICES_BYTES = 64.0 * 56 * 56 * 8
# Convolution workspace in 32 bits, elements a published activation: 5.5 GiB on ResNet-50 (batch 256); none in bf16, nor
# with channels last.
CNN_WORKING_32_BIT = 0.5
# cuDNN's 32-bit workspace beyond a profile, bytes an element of convolution output: 6.3 GiB on ResNet-50 (batch 256).
WORKSPACE_BYTES_32_BIT = 2.4

# Outside the allocator: the CUDA context, and NCCL's 0.69 GB on 4 A100s (https://github.com/NVIDIA/nccl/issues/964) for
# each group of ranks (https://github.com/NVIDIA/nccl/issues/986), with 3.28 GB more once 8 H100s exchange all to all
# (https://github.com/NVIDIA/nccl/issues/1685, 2025-04-16).
CONTEXT_BYTES = 0.75 * GIB
NCCL_BYTES = 0.69e9
ALL_TO_ALL_BYTES_PER_PEER = 3.28e9 / 7
# Larger NVLink domains (GB200 NVL72) exchange by kernels with buffers of their own, not by NCCL's channels to each peer
# (hybridep in the recipes of Megatron-Bridge at v0.4.1).
MEASURED_PEERS = 8.0
# Reserved over allocated: 0.1 to 6% in runs above 125 GiB, with the expandable segments that bootstrap/agent sets
# (PYTORCH_CUDA_ALLOC_CONF, https://pytorch.org/docs/stable/notes/cuda.html).
FRAGMENTATION = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Bytes of the peak and its parts, at the loss or at the end of the backward pass.

    Attributes:
        p95: 95th percentile of the bytes that the allocator holds, with those that only other streams can use
            (https://pytorch.org/docs/stable/notes/cuda.html, memory management): FSDP2's reduced gradients cannot take
            what the backward pass frees. Where no room is left, the allocator returns all free blocks in each step:
            0.60 s for 0.36 (8B, two H100, tests/benchmarks/results/trainer_2xh100_202611.md).
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
    kept, logits = activation_bytes(x), logits_bytes(x)
    # Micro-batches whose activations the first and the last stage keep: 1F1B and interleaving (arXiv:2104.04473, 2.2;
    # arXiv:2205.05198, section 4.2.3).
    waiting = np.minimum(x.pipeline, x.grad_accum)
    chunked = np.where(x.virtual_stages > 1, (x.pipeline - 1.0) / (x.pipeline * x.virtual_stages), 0.0)
    first, last = waiting * (1.0 + chunked), ((x.virtual_stages - 1.0) * waiting + 1.0) / x.virtual_stages
    copies = np.where(gathers_all, held * x.element, _cast_bytes(x, logits)) + held * x.cached_bytes
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
            units = backward_bytes(x, early=early, saved=kept.saved * first, working=kept.working)
            end = tuple(np.where(x.uses_fully_shard, own, other) for own, other in zip(units, end, strict=True))
            cast = np.where(x.uses_fully_shard, loss_bytes(x), cast)
    final, activations, gathered = end
    at_loss, at_end = early + saved + np.maximum(logits, kept.working) + cast, final + activations + gathered
    is_loss, most = at_loss >= at_end, np.maximum(at_loss, at_end)
    weights = np.where(zero3 | gathers_all, sharded, held) * x.weight_bytes
    own_states = np.where(zero1, sharded * np.minimum(x.recipe.optimizer_instances, x.ranks), held)
    optimizer, workspace = own_states * (x.optimizer_bytes + x.master_bytes), _workspace_bytes(x)
    peak = weights + optimizer + buckets + most + workspace
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
        nccl=_nccl_bytes(x),
    )


def _cast_bytes(x: Case, logits: Number) -> Number:
    """Bytes of autocast's copies of the weights at the loss."""
    # Recomputed layers make autocast's copies again, before or after the logits' gradient exists. 32-bit experts have
    # no copy, and torchao keeps none of a layer's weights (h200_fp8_202611.md).
    held, head = x.stage_parameters, np.minimum(x.table_parameters / x.tensor, x.stage_parameters)
    wide = np.where(x.experts_in_32_bits, x.rank_experts, 0.0)
    if x.casts_fp8:
        return head * x.cast_bytes
    again = np.maximum((held - head) * x.cast_bytes - logits / 6.0, 0.0)
    again = np.maximum(again - wide * x.cast_bytes, 0.0)
    return np.where(x.checkpointing == FULL, head * x.cast_bytes + again, (held - wide) * x.cast_bytes)


def _workspace_bytes(x: Case) -> Number:
    """Bytes that kernels work in, with the largest 4-bit weight, widened."""
    widened: Number = 0.0
    if x.recipe.tuning.four_bit:
        widened = x.element * x.model.hidden_size * max(x.model.ffn_size, x.query) / x.tensor
    streams = GROUPED_STREAMS if x.model.experts and not x.recipe.loops_experts else 0.0
    fused = (1.0 + streams) * (x.recipe.framework in MEGATRON)
    return WORKSPACE_BYTES + widened + fused * x.rates.product_workspace


def _nccl_bytes(x: Case) -> Number:
    """Bytes of NCCL's buffers: those of each group of ranks, and those of an exchange."""
    groups = 1.0 * (x.ranks > 1) + (x.tensor > 1) + (x.pipeline > 1) + (x.context > 1) + (x.expert > 1)
    peers = np.minimum(np.minimum(x.expert, x.rates.gpus_per_node), MEASURED_PEERS) - 1.0
    return groups * NCCL_BYTES + peers * ALL_TO_ALL_BYTES_PER_PEER


# Measured peak above the estimate that 19 of 20 rows of a layout stay below (of fewer rows, all), in rows of plain
# PyTorch and the reference trainer on one to four H200 (with results/h200_x2_trainer_202611.csv; a test
# compares). No layout takes less than all together: 0.009 of 33 rows with ZeRO and 7 with context ranks, 0.002 of 5
# with experts.
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
    share = np.where(x.tensor > 1, TENSOR, share)
    return np.where(x.pipeline > 1, UNMEASURED, share)


def limit_bytes(gpu_memory_bytes: Number, nccl_bytes: Number) -> Number:
    """Largest peak that fits into the memory that the driver shows, bytes."""
    return np.maximum((gpu_memory_bytes - CONTEXT_BYTES - nccl_bytes) / (1.0 + FRAGMENTATION), 0.0)


class Activations(NamedTuple):
    """Bytes that a micro-batch saves in a stage, of one layer's backward pass, and of one layer unsaved."""

    saved: Number
    working: Number
    layer: Number
    uneven: Number = 0.0  # share of ``saved`` that a router adds which is not forced to balance


def activation_bytes(x: Case) -> Activations:
    """Compute the bytes of each layout."""
    samples, working_of_samples = _sample_bytes(x)
    if not x.model.layers:
        return Activations(samples, working_of_samples, 0.0)
    model, element = x.model, x.element
    table = list(operations(x))
    everything: Number = sum(op.kept for op in table)
    # Selective keeps inputs, attention's output and the products that it does not repeat.
    ffn = x.inner + x.routed * x.kept_capacity
    up = (model.matrices_per_ffn - 1.0) * ffn
    kept_full = x.residual * model.hidden_size / x.split
    matrices = (element * model.hidden_size + x.dispatched) / x.split
    matrices = matrices + element * (x.query + 2.0 * x.kv + up) / x.tensor
    if x.recipe.tuning.adapts and x.recipe.framework != TRAINER:  # the trainer computes these again (recompute.py)
        matrices = matrices + element * adapted_sides(model, x.recipe.tuning)[1] / x.tensor
    kept_selective = kept_full + element * x.query / x.tensor + (1.0 - x.code.selective_recompute) * matrices
    per_token = np.where(
        x.checkpointing == NONE, everything, np.where(x.checkpointing == SELECTIVE, kept_selective, kept_full)
    )
    # Beside its inputs: gradients of its widest tensors, the gathered sequence, keys and values of two context ranks
    # with gradients, tokens exchanged with experts.
    backward = everything - per_token + element * (up + ffn) / x.tensor + kept_full
    if x.is_t5 and x.has_flash:  # gradient of the bias of each score, before the sum over samples
        backward = backward + element * x.heads * x.keys
    splits = (x.sequence_parallel > 0) & (x.tensor > 1)
    backward = backward + np.where(splits, element * model.hidden_size, 0.0)
    backward = backward + np.where(x.context > 1, 8.0 * element * x.kv / x.tensor, 0.0)
    backward = backward + np.where(x.expert > 1, 2.0 * x.dispatched / x.split, 0.0)
    resident = x.live_share * (1.0 - x.recipe.offloaded_layers / model.layers)
    saved = x.tokens * per_token * x.stage_layers * resident + samples
    of_experts = sum(op.kept for op in table if op.name in ("experts", "routing"))
    uneven = (EXPERT_CAPACITY - 1.0) * of_experts / everything if x.code.nvidia_recipe else 0.0
    return Activations(saved, x.tokens * backward + working_of_samples, x.tokens * everything, uneven)


def _sample_bytes(x: Case) -> tuple[Number, Number]:
    """Bytes that one micro-batch of samples saves, and bytes of the backward pass on top of them."""
    profile = x.model.profile
    if profile is None:
        images = x.micro_batch * x.model.activations_per_sample * x.element
        working = CNN_WORKING_32_BIT if x.element > 2.0 else 0.0
        pooling = 0.0 if x.model.layers else POOLING_INDICES_BYTES
        return SAVED_PER_ACTIVATION * images + pooling * x.micro_batch, working * images
    # FSDP's gathered weights take the place of the profile's copies.
    copies = float(x.model.parameters) * x.element * (x.element == 2.0)
    copied = np.where((x.sharding >= ZERO2) & (x.data > 1), copies, 0.0)

    def peak(pass_: Pass) -> Number:
        grown = [line.bytes_per_sample * x.micro_batch for line in pass_.peak]
        fixed = [np.maximum(line.fixed_bytes - copied, 0.0) for line in pass_.peak]
        return np.asarray(np.max([a + b for a, b in zip(fixed, grown, strict=True)], axis=0))

    workspace = 0.0 if x.element == 2.0 else WORKSPACE_BYTES_32_BIT * profile.convolution_outputs
    return traced(x, peak), x.micro_batch * workspace


def logits_bytes(x: Case) -> Number:
    """Bytes of the logits, their upcast, log-softmax and gradients at the peak, on the last stage."""
    loss_bytes = x.code.loss_bytes
    if x.code.written_out and not x.code.loss_turn_elements and x.element == 2.0:
        # Hugging Face's decoders widen the logits (loss/loss_utils.py, ForCausalLMLoss), and their gradient has 32
        # bits; the others give CrossEntropyLoss 16-bit logits: 10.0 and 12.0 bytes a logit alive at the peak (BERT,
        # GPT-2: traced as in docs/models.md, torch 2.11, transformers 5.23, 2026-11-23).
        loss_bytes -= 2.0 * (x.model.architecture in ("encoder", "seq2seq", "speech"))
    if x.recipe.fused_loss or (x.code.nvidia_recipe and x.recipe.tuning.adapts):
        loss_bytes = MEGATRON_FUSED_LOSS_BYTES
    # FSDP does not compile the loss. Plain PyTorch gathers all tensor ranks' logits.
    fused = x.recipe.compiled & np.logical_not(x.is_narrow)
    each = np.where(fused, min(loss_bytes, COMPILED_LOSS_BYTES), loss_bytes)
    each = each + x.model.logits_soft_cap * x.element  # the output of tanh
    logits = x.head_tokens * x.model.vocab_size / (x.tensor if x.code.splits_logits else 1.0)
    turn = 0.0 if x.recipe.compiled else np.minimum(logits, x.code.loss_turn_elements)
    return logits * each + turn * LOSS_TURN_BYTES
