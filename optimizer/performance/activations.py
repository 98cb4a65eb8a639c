"""Bytes of activations and logits that a micro-batch keeps on the fullest rank, an operation a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance.case import EXPERT_CAPACITY, Case
from optimizer.performance.operations import module_passes, operations
from optimizer.performance.types import FULL, NONE, SELECTIVE, ZERO2, Number

# Peak bytes a logit with a compiled loss: 5.9 to 6.6 on H200 (GPT-2, Llama 410M, 1B and 3B, torch 2.11, 2026-11-21).
COMPILED_LOSS_BYTES = 6.0
# Megatron's own fused loss, of NeMo's fine-tuning too (golden_values of Megatron-LM's tests, 2026; frameworks.toml).
MEGATRON_FUSED_LOSS_BYTES = 10.0
# A turn's 32-bit log-softmax, its probabilities and their product (bootstrap/trainer/loss.py).
LOSS_TURN_BYTES = 12.0
# Input and output of each convolution, in elements a published activation.
SAVED_PER_ACTIVATION = 2.0
# A ResNet's max pooling of one image: 64 channels of 56 x 56, 8 bytes each.
POOLING_INDICES_BYTES = 64.0 * 56 * 56 * 8
# Convolution workspace in 32 bits, elements a published activation: 5.5 GiB on ResNet-50 (batch 256, fp32 and tf32,
# H200, torch 2.11, 2026-11-21); none in bf16, nor with channels last.
CNN_WORKING_32_BIT = 0.5
# cuDNN's 32-bit workspace beyond a profile, bytes an element of convolution output: 6.3 GiB on ResNet-50 (batch 256,
# H200, torch 2.11, fp32 and tf32, 2026-11-21); 0.1 GiB, in bf16, is left out.
WORKSPACE_BYTES_32_BIT = 2.4


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a micro-batch saves in a stage, of one layer's backward pass, and of one layer unsaved.

    Attributes:
        uneven: share of ``saved`` that a router adds which is not forced to balance, as NVIDIA's recipes force it.
    """

    saved: Number
    working: Number
    layer: Number
    uneven: Number = 0.0


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
        is_cnn = x.model.activations_per_sample > 0 and not x.model.layers
        return SAVED_PER_ACTIVATION * images + is_cnn * POOLING_INDICES_BYTES * x.micro_batch, working * images
    # FSDP's gathered weights take the place of the profile's copies.
    copies = float(x.model.parameters) * x.element * (x.element == 2.0)
    copied = np.where((x.sharding >= ZERO2) & (x.data > 1), copies, 0.0)
    none, full = (
        np.max(
            [
                np.maximum(line.fixed_bytes - copied, 0.0) + line.bytes_per_sample * x.micro_batch
                for line in traced.peak
            ],
            axis=0,
        )
        for traced in module_passes(x, profile)
    )
    workspace = 0.0 if x.element == 2.0 else WORKSPACE_BYTES_32_BIT * profile.convolution_outputs
    return np.where(x.checkpointing == FULL, full, none), x.micro_batch * workspace


def micro_batches_in_flight(x: Case) -> tuple[Number, Number]:
    """Micro-batches whose activations the first and the last stage keep.

    1F1B and interleaving: arXiv:2104.04473, 2.2; arXiv:2205.05198, section 4.2.3.
    """
    first = np.minimum(x.pipeline, x.grad_accum)
    interleaved = x.virtual_stages > 1
    most = first * np.where(interleaved, 1.0 + (x.pipeline - 1.0) / (x.pipeline * x.virtual_stages), 1.0)
    last = np.where(interleaved, ((x.virtual_stages - 1.0) * first + 1.0) / x.virtual_stages, 1.0)
    return most, last


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
