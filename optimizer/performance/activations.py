"""Bytes of activations and logits that a micro-batch keeps on the fullest rank, an operation a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from optimizer.performance.case import EXPERT_CAPACITY, Case
from optimizer.performance.fine_tuning import adapted_sides
from optimizer.performance.frameworks import MEGATRON
from optimizer.performance.operations import module_passes
from optimizer.performance.types import FULL, NONE, SELECTIVE, ZERO2, Number

# Tensors that NewGELUActivation saves beyond its input: 12.2, 12.3 and 12.4 bytes an element on H200 (GPT-2 and GPT-2
# XL in bf16, GPT-2 in tf32, torch 2.11, 2026-11-21).
WRITTEN_GELU_TENSORS = 3.0
# Casts that a tensor rank keeps whole: five products each cast a norm's output, which gave 5 of 6 bytes on H200 without
# the sequence split and 8 of 10 with it (Llama 3B over four ranks, torch 2.11, 2026-11-21).
REPEATED_CASTS = 5.0
# Peak bytes a logit with a compiled loss: 5.9 to 6.6 on H200 (GPT-2, Llama 410M, 1B and 3B, torch 2.11, 2026-11-21).
COMPILED_LOSS_BYTES = 6.0
# Megatron's own fused loss, of NeMo's fine-tuning too (golden_values of Megatron-LM's tests, 2026; frameworks.toml).
MEGATRON_FUSED_LOSS_BYTES = 10.0
# Widened and normalised queries and keys that a norm over heads keeps beside its output: 6.0 bytes in all with it
# (Qwen 3 against Llama, docs/models.md, torch 2.11, transformers 5.23, 2026-11-22).
HEAD_NORM_BYTES = 4.0
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


def kept_bytes(x: Case) -> Iterator[tuple[str, Number]]:
    """List what one layer keeps for its backward pass, bytes a token (Korthikanti et al., arXiv:2205.05198, section 4).

    Norms save input and output, written-out RMSNorm also the normalised input; dropout a mask byte. Under autocast
    rotary positions save queries and keys again: 3.7 and 3.9 bytes of each on H200 (Llama 410M and 3.6B, torch 2.11,
    2026-11-21).
    """
    model, element, h = x.model, x.element, x.model.hidden_size
    # Tensor ranks' collectives cut compiled layers into parts, which save what eager code does (36.0 GiB of Llama 3B
    # with two tensor ranks, 4.5% less than eager; two H100, torch 2.11, trainer_torchtitan_2xh100_202611.md).
    cut = x.code.compiles_layers & (x.tensor > 1)
    compiled = np.where(cut, 0.0, 1.0 * x.recipe.compiled)
    eager = x.code.written_out * (1.0 - compiled)
    by_hand = model.gated_mlp * eager
    autocast = np.where(x.residual > element, 1.0, 0.0)
    written_norms = eager * (not x.has_fused_norms) if model.gated_mlp or x.is_t5 else 0.0
    # Fused fp8 keeps the inputs of products in 8 bits (https://docs.nvidia.com/deeplearning/transformer-engine).
    product_input = 1.0 if x.has_fused_fp8 else element
    # Megatron alone has experts in that fp8. Ranks that share an expert keep its rows whole. NVIDIA's recipes permute
    # rows in a kernel that keeps none.
    narrowed = product_input / element if x.recipe.framework in MEGATRON else 1.0
    sent = narrowed * x.expert_slices / x.tensor
    yield "dispatch of experts", _dispatched_bytes(x) * (sent if x.code.nvidia_recipe else sent + 1.0 / x.split)
    redone = x.recipe.recomputed
    norm_output = 0.0 if "layernorm" in redone else product_input
    norms = x.norms * (np.maximum(x.residual, 4.0 * written_norms) + x.residual * written_norms + norm_output)
    yield "norms", h * norms / x.split
    yield "casts", h * element * autocast * eager * x.input_casts / x.split
    if model.gated_mlp:
        yield "casts of tensor ranks", by_hand * autocast * element * h * REPEATED_CASTS * (1.0 - 1.0 / x.tensor)
    if x.has_dropout:
        yield "dropout", 2.0 * h / x.split
    if model.latent_attention:  # before and after their norms
        yield "latents", 2.0 * element * model.latent_attention.latent_width
    heads = (x.query + x.kv) / x.tensor
    # Attention keeps its output in 16 bits beside the 8 of the projection's input.
    attention_inputs = heads + x.kv / x.tensor if "mla_up_proj" not in redone else 0.0
    output = (element + x.has_fused_fp8) * x.query / x.tensor
    yield "attention projections", element * attention_inputs + output
    if not x.is_t5:
        yield "rotary positions", x.residual * by_hand * autocast * heads
    if not x.code.fused_kernels:  # attention's output once more
        yield "joins of the context ring", np.where(x.context > 1, element * x.query / x.tensor, 0.0)
    if model.head_norms:
        # Under autocast the kernel reads a widened copy.
        widened = by_hand * np.where(autocast > 0, 1.0, float(not x.has_fused_norms))
        yield "norms of heads", heads * (element + HEAD_NORM_BYTES * widened)
    # A score's softmax, the product's input if another tensor, and a mask byte. Attention without a fused kernel: 4.2
    # bytes a score in 32 bits and 5.1 by a compiler on H200 (Llama 1B in tf32 and BERT base, torch 2.11, 2026-11-21).
    is_compiled = x.recipe.compiled and x.has_dropout and not x.causal
    softmax = element if is_compiled else max(x.wide_residual, 4.0 * x.code.written_out)
    if not x.has_flash:  # soft-capped scores keep the output of tanh
        copied = element if softmax > element else element * x.has_dropout
        a_score = softmax + copied + x.has_dropout + model.soft_cap * element
        yield "scores", x.heads * x.keys * a_score / x.tensor
    if x.masked_share:
        # PyTorch's attention keeps a mask in each layer with a window, and repeats keys and values there.
        repeated = 2.0 * (x.query - x.kv) / x.tensor
        yield "masks of windows", x.masked_share * element * (x.recipe.seq_len + repeated)
    # A compiler, or one kernel, recomputes the gate's product. T5 1.1's gate is GPT-2's function.
    by_operators = x.is_t5 if model.gated_mlp else x.causal
    gelu = WRITTEN_GELU_TENSORS * x.residual * eager * by_operators
    matrices = model.matrices_per_ffn - 1.0 + (model.gated_mlp and not x.code.fused_gate) * (1.0 - compiled)
    masks = x.is_t5 * x.has_dropout  # a byte
    # MLPerf's adapters keep the gate's inputs in 8 bits (FP8_ACTIVATION, Megatron's activation_func_fp8_input_store).
    gate_input = 1.0 if x.has_fused_fp8 and x.code.nvidia_recipe and x.recipe.tuning.adapts else element
    yield "feed-forward", (gate_input * matrices + product_input + gelu + masks) * x.inner / x.tensor
    if model.experts:
        expert_input = 1.0 if x.has_fused_fp8 else x.expert_element
        # Megatron multiplies an activation by its router's probability and keeps both, but where one kernel of a gate
        # does it (MLP.forward in megatron/core/transformer/mlp.py at d98e8a6; moe_act repeats it).
        scaled = element * (x.recipe.framework in MEGATRON and not model.gated_mlp)
        of_expert = x.expert_element * matrices + ("moe_act" not in redone) * (expert_input + scaled)
        yield "experts", of_expert * x.routed * x.kept_capacity / x.tensor
    if x.recipe.tuning.adapts:
        # Frozen norms that are written out keep no normalised input, and a product without an adapter no input; an
        # adapter keeps its inner vector.
        unsaved = 2.0 * element * model.gated_mlp * h * (not x.has_fused_norms)
        if x.recipe.tuning.lora_targets != "all":
            unsaved += product_input * (h + model.ffn_size)
        kept = element * x.recipe.tuning.lora_rank * adapted_sides(model, x.recipe.tuning)[2]
        yield "adapters", (kept - unsaved) / x.split


def _dispatched_bytes(x: Case) -> Number:
    """Bytes a token of the rows that experts get."""
    mixtures = x.model.mixture_layers / max(x.model.layers, 1)
    used = max(1, x.model.experts_per_token)
    return x.expert_element * x.model.hidden_size * mixtures * used * x.kept_capacity


def activation_bytes(x: Case) -> Activations:
    """Compute the bytes of each layout."""
    samples, working_of_samples = _sample_bytes(x)
    if not x.model.layers:
        return Activations(samples, working_of_samples, 0.0)
    model, element = x.model, x.element
    kept = dict(kept_bytes(x))
    everything: Number = sum(kept.values())
    dispatched = _dispatched_bytes(x)
    # Selective keeps inputs, attention's output and the products that it does not repeat.
    ffn = x.inner + x.routed * x.kept_capacity
    up = (model.matrices_per_ffn - 1.0) * ffn
    kept_full = x.residual * model.hidden_size / x.split
    matrices = (element * model.hidden_size + dispatched) / x.split
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
    backward = backward + np.where(x.expert > 1, 2.0 * dispatched / x.split, 0.0)
    resident = x.live_share * (1.0 - x.recipe.offloaded_layers / model.layers)
    saved = x.tokens * per_token * x.stage_layers * resident + samples
    of_experts = kept["dispatch of experts"] + kept.get("experts", 0.0)
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
