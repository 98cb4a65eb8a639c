"""Bytes of activations and logits that a micro-batch keeps on the fullest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance.fine_tuning import live_share, unsaved_bytes
from optimizer.performance.inputs import Inputs
from optimizer.performance.samples import sample_bytes
from optimizer.performance.stage import (
    computes_narrow,
    experts_miss_autocast,
    grouped_in_32_bits,
    layers_of_stage,
    masks_windows,
    scores_by_compiler,
    tokens_of_rank,
)
from optimizer.performance.types import NONE, SELECTIVE, Number

# Tokens of the fullest expert rank over the mean: ST-MoE's capacity (arXiv:2202.08906, 2022-02).
EXPERT_CAPACITY = 1.25
# Tensors that NewGELUActivation saves beyond its input: 12.2, 12.3 and 12.4 bytes an element on H200 (GPT-2 and GPT-2
# XL in bf16, GPT-2 in tf32, torch 2.11, 2026-11-21).
WRITTEN_GELU_TENSORS = 3.0
# Casts that a tensor rank keeps whole, without and with the sequence split: 5 of 6 bytes and 8 of 10 on H200 at three
# quarters of them (Llama 3B over four ranks, torch 2.11, 2026-11-21).
REPEATED_CASTS = (3.0, 5.0)
# Peak bytes a logit with a compiled loss: 5.9 to 6.6 on H200 (GPT-2, Llama 410M, 1B and 3B, torch 2.11, 2026-11-21).
COMPILED_LOSS_BYTES = 6.0
# Widened and normalised queries and keys that a norm over heads keeps beside its output: 6.0 bytes in all with it
# (Qwen 3 against Llama, docs/models.md, torch 2.11, transformers 5.23, 2026-11-22).
HEAD_NORM_BYTES = 4.0
# A turn's 32-bit log-softmax, its probabilities and their product (bootstrap/trainer/loss.py).
LOSS_TURN_BYTES = 12.0


@dataclass(frozen=True, slots=True)
class _TokenBytes:
    outside: Number
    whole: Number  # on each tensor rank
    sliced: Number
    dispatched: Number
    cast: Number
    residual: Number


def _token_bytes(x: Inputs, capacity: Number, *, narrow: bool) -> _TokenBytes:
    """Count the tensors that a layer saves (Korthikanti et al., arXiv:2205.05198, section 4)."""
    element = x.element_bytes
    residual_bytes = element if narrow else x.residual_bytes
    # Norms save input and output, written-out RMSNorm also the normalised input; dropout a mask byte. Under autocast
    # rotary positions save queries and keys again: 3.7 and 3.9 bytes of each on H200 (Llama 410M and 3.6B, torch 2.11,
    # 2026-11-21).
    autocast = np.where(residual_bytes > element, 1.0, 0.0)
    # Tensor ranks' collectives cut compiled layers into parts, which save what eager code does (36.0 GiB of Llama 3B
    # with two tensor ranks, 4.5% less than eager; two H100, torch 2.11, trainer_torchtitan_2xh100_202611.md).
    cut = (x.compiles_layers > 0) & (x.tensor > 1)
    compiled = np.where(cut, 0.0, x.compiled)
    eager = x.written_out * (1.0 - compiled)
    by_hand = x.llama_like * eager
    wide = residual_bytes * by_hand
    written_norms = np.maximum(x.llama_like, x.t5_like) * eager * (1.0 - x.fused_norms)
    norms = x.norms * (np.maximum(residual_bytes, 4.0 * written_norms) + residual_bytes * written_norms + element)
    copies = element * autocast * eager * x.input_casts
    rotary = wide * (1.0 - x.t5_like)
    products = element * (2.0 * x.query + 2.0 * x.kv) + rotary * autocast * (x.query + x.kv)
    if np.any(x.context > 1):  # attention's output once more
        products = products + element * x.query * ((x.context > 1) & (x.fused_kernels == 0))
    if np.any(x.head_norms > 0):
        # Under autocast the kernel reads a widened copy.
        widened = by_hand * np.where(autocast > 0, 1.0, 1.0 - x.fused_norms)
        products = products + x.head_norms * (x.query + x.kv) * (element + HEAD_NORM_BYTES * widened)
    # A compiler recomputes the gate's product.
    gated = x.mlp_matrices > 2.5
    by_operators = np.where(gated, x.t5_like, x.causal)  # T5 1.1's gate is GPT-2's function
    gelu = WRITTEN_GELU_TENSORS * residual_bytes * eager * by_operators
    of_expert: Number = element if narrow else np.where(experts_miss_autocast(x), 4.0, element)
    matrices = x.mlp_matrices + gated * (1.0 - compiled)
    inner = (element * matrices + gelu) * x.shared_ffn + of_expert * matrices * x.routed_ffn * capacity
    inner = inner + x.t5_like * x.dropout * x.shared_ffn  # a mask byte
    # Each tensor rank keeps the experts' tokens whole.
    mixtures = x.mixture_layers / np.maximum(x.layers, 1.0)
    dispatched = of_expert * x.hidden * mixtures * x.experts_used * capacity
    # A score's softmax, the product's input if another tensor, and a mask byte. Attention without a fused kernel: 4.2
    # bytes a score in 32 bits and 5.1 by a compiler on H200 (Llama 1B in tf32 and BERT base, torch 2.11, 2026-11-21).
    softmax = np.maximum(x.residual_bytes, 4.0 * x.written_out)
    copied = np.where(softmax > element, element, element * x.dropout)
    # Soft-capped scores keep the output of tanh.
    a_score = (1.0 - x.flash) * (softmax + copied + x.dropout + x.soft_cap * element) + x.flash * (
        grouped_in_32_bits(x) * softmax + scores_by_compiler(x) * (2.0 * element + 1.0)
    )
    masked = np.where(masks_windows(x), x.windowed, 0.0)
    unsaved = unsaved_bytes(x) if np.any(x.adapter_rank > 0) else 0.0
    return _TokenBytes(
        outside=x.hidden * (norms + 2.0 * x.dropout + copies) + 8.0 * x.experts * mixtures + dispatched - unsaved,
        # Latents are kept before and after their norms; PyTorch's attention keeps a mask in each layer with a window,
        # and repeats keys and values there.
        whole=2.0 * element * x.latent + masked * element * x.seq_len,
        sliced=products + masked * 2.0 * element * (x.query - x.kv) + x.heads * x.keys * a_score + inner,
        dispatched=dispatched,
        # Five products each cast a norm's output.
        cast=by_hand * autocast * element * x.hidden,
        residual=residual_bytes * x.hidden,
    )


def activation_bytes(x: Inputs) -> tuple[Number, Number, Number]:
    """Bytes that a micro-batch saves in a stage, of one layer's backward pass, and of one layer unsaved."""
    fsdp = computes_narrow(x)
    if not np.any(fsdp):
        return _activation_bytes(x, narrow=False)
    if np.all(fsdp):
        return _activation_bytes(x, narrow=True)
    narrow, wide = _activation_bytes(x, narrow=True), _activation_bytes(x, narrow=False)
    saved, working, layer = (np.where(fsdp, a, b) for a, b in zip(narrow, wide, strict=True))
    return saved, working, layer


def _activation_bytes(x: Inputs, *, narrow: bool) -> tuple[Number, Number, Number]:
    tokens = tokens_of_rank(x)
    element = x.element_bytes
    split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)
    capacity = np.where(x.expert > 1, EXPERT_CAPACITY, 1.0)
    token = _token_bytes(x, capacity, narrow=narrow)
    everything = token.outside / split + token.dispatched + token.whole + token.sliced / x.tensor
    if np.any(token.cast):
        again = np.where(x.sequence_parallel > 0, REPEATED_CASTS[1], REPEATED_CASTS[0])
        everything = everything + token.cast * again * (1.0 - 1.0 / x.tensor)
    # Selective keeps inputs, attention's output and the products that it does not repeat.
    ffn = x.shared_ffn + x.routed_ffn * capacity
    up = (x.mlp_matrices - 1.0) * ffn
    kept_full = token.residual / split
    matrices = (element * x.hidden + token.dispatched) / split + element * (x.query + 2.0 * x.kv + up) / x.tensor
    kept_selective = kept_full + element * x.query / x.tensor + (1.0 - x.selective_recompute) * matrices
    per_token = np.where(
        x.checkpointing == NONE, everything, np.where(x.checkpointing == SELECTIVE, kept_selective, kept_full)
    )
    # Beside its inputs: gradients of its widest tensors, the gathered sequence, keys and values of two context ranks
    # with gradients, tokens exchanged with experts.
    layer = everything - per_token + element * (up + ffn) / x.tensor + kept_full
    if np.any(x.t5_like > 0):  # gradient of the bias of each score, before the sum over samples
        layer = layer + x.t5_like * x.flash * element * x.heads * x.keys
    if np.any(x.sequence_parallel > 0):
        layer = layer + np.where((x.sequence_parallel > 0) & (x.tensor > 1), element * x.hidden, 0.0)
    if np.any(x.context > 1):
        layer = layer + np.where(x.context > 1, 8.0 * element * x.kv / x.tensor, 0.0)
    if np.any(x.expert > 1):
        layer = layer + np.where(x.expert > 1, 2.0 * token.dispatched / split, 0.0)

    tokens = np.where(x.layers > 0, tokens, 0.0)
    samples, working_of_samples = sample_bytes(x)
    saved = tokens * per_token * layers_of_stage(x) * live_share(x) + samples
    return saved, tokens * layer + working_of_samples, tokens * everything


def micro_batches_in_flight(x: Inputs) -> tuple[Number, Number]:
    """Micro-batches whose activations the first and the last stage keep.

    1F1B and interleaving: arXiv:2104.04473, 2.2; arXiv:2205.05198, section 4.2.3.
    """
    first = np.minimum(x.pipeline, x.grad_accum)
    interleaved = x.virtual_stages > 1
    most = first * np.where(interleaved, 1.0 + (x.pipeline - 1.0) / (x.pipeline * x.virtual_stages), 1.0)
    last = np.where(interleaved, ((x.virtual_stages - 1.0) * first + 1.0) / x.virtual_stages, 1.0)
    return most, last


def logits_bytes(x: Inputs) -> Number:
    """Bytes of the logits, their upcast, log-softmax and gradients at the peak, on the last stage."""
    # FSDP does not compile the loss. Plain PyTorch gathers all tensor ranks' logits.
    fused = (x.compiled > 0) & np.logical_not(computes_narrow(x))
    loss_bytes = np.where(fused, np.minimum(x.loss_bytes, COMPILED_LOSS_BYTES), x.loss_bytes)
    loss_bytes = loss_bytes + x.logits_soft_cap * x.element_bytes  # the output of tanh
    tokens = x.micro_batch * x.head_tokens / x.context
    logits = tokens * x.vocab / np.where(x.splits_logits > 0, x.tensor, 1.0)
    turn = np.where(x.compiled > 0, 0.0, np.minimum(logits, x.loss_turn_elements))
    return logits * loss_bytes + turn * LOSS_TURN_BYTES
