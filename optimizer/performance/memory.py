"""Peak memory of the fullest rank, in bytes by part.

docs/estimator.md derives the equations. The peak is the larger of two moments: the loss, when all activations and the
logits are alive and gradients are not yet (unless they persist), and the optimizer step, when all gradients are alive
and the activations are gone.
"""

from __future__ import annotations

import numpy as np

from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO1, ZERO2, ZERO3

PARTS = ("weights", "gradients", "optimizer_state", "activations", "logits", "communication")

# DDP and FSDP send in pieces: ZeRO-3 holds the gathered layer in use and the next one being fetched.
GATHERED_LAYERS = 2.0


def memory_bytes(x: Inputs) -> dict[str, Number]:
    """Bytes of each of PARTS at the peak; they add up to the peak."""
    parameters = stage_parameters(x)
    shards = np.maximum(x.data, 1.0)
    shard = {stage: np.where(x.sharding >= stage, shards, 1.0) for stage in (ZERO1, ZERO2, ZERO3)}

    weights = parameters * x.weight_bytes / shard[ZERO3]
    state = parameters * (x.optimizer_state_bytes + x.master_bytes) / shard[ZERO1]
    gradients = parameters * x.gradient_bytes / shard[ZERO2]
    # While a layer's gradients are reduced, ZeRO-2 and 3 hold that layer's whole gradients.
    layer = layer_parameters_of_rank(x)
    reducing = np.where(x.sharding >= ZERO2, layer * x.gradient_bytes, 0.0)
    buckets = np.where((x.sharding == DDP) & (x.data > 1), parameters * x.bucket_bytes, 0.0)
    cast = np.where(
        x.sharding == ZERO3,
        np.where(x.data > 1, GATHERED_LAYERS * layer * x.element_bytes, parameters * x.cast_bytes),
        parameters * x.cast_bytes,
    )

    saved, working = activation_bytes(x)
    logits = logits_bytes(x)
    early = np.where((x.persistent_gradients > 0) | (x.grad_accum > 1) | (x.pipeline > 1), gradients, 0.0)

    at_loss = early + saved + np.maximum(logits, working) + cast
    at_step = gradients + reducing
    loss_peaks = at_loss >= at_step
    nothing = np.zeros_like(at_loss)
    return {
        "weights": weights + np.where(loss_peaks, cast, nothing),
        "gradients": np.where(loss_peaks, early, at_step),
        "optimizer_state": state + nothing,
        "activations": np.where(loss_peaks, saved + np.maximum(working - logits, 0.0), nothing),
        "logits": np.where(loss_peaks, logits, nothing),
        "communication": buckets + nothing,
    }


def stage_parameters(x: Inputs) -> Number:
    """Parameters of the fullest rank's pipeline stage and tensor slice, before any sharding over data ranks.

    The first stage has the input embedding and the last the output projection; with tied embeddings both keep a copy,
    so the fullest stage has its layers and one table.
    """
    layers = np.ceil(x.layers / x.pipeline)
    table = np.where(x.pipeline > 1, np.minimum(x.vocab * x.hidden, x.embedding_parameters), x.embedding_parameters)
    return (layers * x.layer_parameters + table) / x.tensor


def layer_parameters_of_rank(x: Inputs) -> Number:
    """Parameters of the largest unit that ZeRO gathers at once: a layer, or the embedding if that is larger."""
    table = np.minimum(x.vocab * x.hidden, x.embedding_parameters)
    return np.maximum(x.layer_parameters, table) / x.tensor


def tokens_of_rank(x: Inputs) -> Number:
    """Tokens of one micro-batch on one rank."""
    return x.micro_batch * x.seq_len / x.context


def activation_bytes(x: Inputs) -> tuple[Number, Number]:
    """Bytes saved for the backward pass, and bytes of one layer's own backward pass on top of them.

    Counted tensor by tensor as in Korthikanti et al., arXiv:2205.05198, section 4, for the sizes of the run's elements.
    """
    tokens = tokens_of_rank(x)
    element, residual = x.element_bytes, x.residual_bytes
    split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)

    # A norm saves its input, its output as the matrix products read it, and (RMSNorm as Hugging Face writes it) the
    # normalised input in the wider type; dropout saves a mask byte. Rotary positions in the wider type save queries and
    # keys once more: 3.7 and 3.9 bytes of each on H200 (Llama 410M and 3.6B, torch 2.11, measured 2026-11-21).
    wide = np.where(residual > element, residual, 0.0) * x.llama_like * (1.0 - x.compiled)
    outside = x.hidden * (2.0 * (residual + wide + element) + 2.0 * x.dropout) / split
    rotary = wide * (x.query + x.kv) / x.tensor
    # Queries, keys, values, the attention's output (the input of the output projection).
    products = element * (2.0 * x.query + 2.0 * x.kv) / x.tensor
    # Feed-forward: every product's output, and the activation function's output that the last product reads.
    up = (x.mlp_matrices - 1.0) * x.ffn * x.experts_used
    inner = element * x.ffn * x.experts_used
    elementwise = inner * np.where(x.mlp_matrices > 2.5, 2.0, 1.0)
    feed_forward = (element * up + elementwise) / x.tensor
    # Unfused attention: softmax output and its 16-bit copy after dropout (2 elements) and a mask byte a score.
    scores = (1.0 - x.flash) * x.heads * (x.seq_len / x.context) * (2.0 * element + 1.0) / x.tensor
    everything = outside + rotary + products + feed_forward + scores

    # Selective keeps each layer's input, attention's output and those of the matrix products that it does not repeat.
    matrices = element * (x.hidden / split + (x.query + 2.0 * x.kv + up) / x.tensor)
    attention_out = element * x.query / x.tensor
    kept_selective = residual * x.hidden / split + attention_out + (1.0 - x.selective_recompute) * matrices
    kept_full = residual * x.hidden / split
    by_setting = [x.checkpointing == NONE, x.checkpointing == SELECTIVE, x.checkpointing == FULL]
    per_token = np.select(by_setting, [everything, kept_selective, kept_full])

    # 1F1B keeps the activations of as many micro-batches as there are stages to come (at most all of them);
    # interleaving keeps 1 + (p - 1) / (p v) times as many (arXiv:2104.04473, 2.2).
    in_flight = np.minimum(x.pipeline, x.grad_accum)
    in_flight = in_flight * np.where(
        x.virtual_stages > 1, 1.0 + (x.pipeline - 1) / (x.pipeline * x.virtual_stages), 1.0
    )
    layers = x.layers / x.pipeline
    transformer = tokens * per_token * layers * in_flight
    recomputed = np.where(x.checkpointing == NONE, 0.0, everything - per_token)
    # The backward pass of one layer holds the gradients of its widest tensors beside what it reads.
    gradient_of_layer = (element * (up + x.ffn * x.experts_used) + residual * x.hidden) / x.tensor
    working = np.where(x.layers > 0, tokens * (recomputed + gradient_of_layer), 0.0)

    # A CNN saves each convolution's input and output (the norm's input): two elements a published activation.
    images = x.micro_batch * x.cnn_activations * element
    return transformer + 2.0 * images, working + np.where(element > 2.0, CNN_WORKING, CNN_WORKING_16_BIT) * images


# Gradients in flight and convolution workspace, in elements a published activation, as measured over what is saved on
# ResNet-50 (batch 256, H200, torch 2.11, 2026-11-21): 5.5 GiB in fp32 and tf32, 0.1 GiB in bf16.
CNN_WORKING = 0.5
CNN_WORKING_16_BIT = 0.05


def logits_bytes(x: Inputs) -> Number:
    """Bytes of the logits, their upcast, log-softmax and gradients at the peak; on the last pipeline stage.

    With more than one pipeline stage the last one keeps few activations, and the fullest is another: they do not add.
    """
    logits = tokens_of_rank(x) * x.vocab * x.loss_bytes / x.tensor
    return np.where(x.pipeline > 1, 0.0, logits)
