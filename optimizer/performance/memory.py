"""Memory of the fullest rank, in bytes by part.

docs/estimator.md derives the equations. The peak is the larger of two moments: the loss, when all activations and the
logits are alive and gradients are not yet (unless they persist), and the end of the backward pass, when all gradients
are alive and of the activations the first layer's. Of a pipeline it is the first stage's or the last's: the first keeps
the activations of the most micro-batches, the last has the logits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from optimizer.performance.inputs import Inputs
from optimizer.performance.samples import sample_bytes
from optimizer.performance.types import FULL, NONE, SELECTIVE, ZERO1, ZERO2, ZERO3, Flag, Number
from optimizer.units import GIB

PARTS = ("weights", "gradients", "optimizer_state", "activations", "logits", "communication", "workspace")

# DDP and FSDP send in pieces: ZeRO-3 holds the gathered layer in use and the next one being fetched.
GATHERED_LAYERS = 2.0
# Tokens of the fullest rank of experts over the mean: what ST-MoE trains with as capacity (arXiv:2202.08906, 2022-02).
# A rank that holds every expert has each token experts_per_token times, however uneven the router is.
EXPERT_CAPACITY = 1.25
# Tensors that GELU saves as Hugging Face's GPT-2 writes it (NewGELUActivation: a power, a tanh, four products) beyond
# its input: 12.2, 12.3 and 12.4 bytes an element on H200 (GPT-2 and GPT-2 XL in bf16, GPT-2 in tf32, torch 2.11,
# 2026-11-21).
WRITTEN_GELU_TENSORS = 3.0
# Casts of the residual's width that a tensor rank keeps whole beyond what is counted, without and with the sequence
# split: 5 of 6 bytes and 8 of 10 on H200 at three quarters of them (Llama 3B over four ranks, torch 2.11, 2026-11-21).
REPEATED_CASTS = (3.0, 5.0)
# Peak bytes a logit when a compiler fuses the loss: the 16-bit logits and one tensor of 32 bits. 5.9 to 6.6 on H200
# (GPT-2, Llama 410M, 1B and 3B, torch 2.11, 2026-11-21).
COMPILED_LOSS_BYTES = 6.0
# cuBLAS keeps 32 MiB a handle on Hopper (CUBLAS_WORKSPACE_CONFIG); 0.1 GiB more than the equations was allocated in the
# smallest runs and in those of 100 GiB alike (GPT-2 to Llama 7B, H200, torch 2.11, 2026-11-21).
WORKSPACE_BYTES = 0.1 * GIB

# Memory outside the allocator's reach. CUDA context and libraries: 0.75 GiB (H200, torch 2.11, measured 2026-11-21:
# tests/benchmarks/measure_steps.py). NCCL: 0.69 GB on 4 A100s (https://github.com/NVIDIA/nccl/issues/964), for each
# group of ranks, which is a communicator with buffers of its own (https://github.com/NVIDIA/nccl/issues/986), and
# 3.28 GB more once 8 H100s exchange all to all (https://github.com/NVIDIA/nccl/issues/1685, 2025-04-16): some a peer.
CONTEXT_BYTES = 0.75 * GIB
NCCL_BYTES = 0.69e9
ALL_TO_ALL_BYTES_PER_PEER = 3.28e9 / 7
# Reserved memory exceeds allocated: blocks are rounded up and free ones do not join. By up to 30% where there is room,
# by 0.1 to 6% in runs above 125 GiB on H200 (torch 2.11, 2026-11-21, data/measured_runs.csv). 5% is left for it, which
# expandable segments keep to (PYTORCH_CUDA_ALLOC_CONF, https://pytorch.org/docs/stable/notes/cuda.html), as
# bootstrap/launch.sh sets them.
FRAGMENTATION = 0.05


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        peak: of each of PARTS at the peak of allocated memory; they add up to it.
        nccl: buffers of the communicators.
    """

    peak: dict[str, Number]
    nccl: Number


@dataclass(frozen=True, slots=True)
class _Moments:
    """Bytes by what holds them. Weights, state and buckets are there at the loss and at the end alike."""

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

    @property
    def at_end(self) -> Number:
        """When the backward pass has come to the first layer."""
        return self.all_gradients + self.last


def memory(x: Inputs) -> Memory:
    """Memory of each configuration."""
    m = _moments(x)
    loss_peaks = m.at_loss >= m.at_end
    return Memory(
        peak={
            "weights": m.weights + np.where(loss_peaks, m.cast, 0.0),
            "gradients": np.where(loss_peaks, m.early, m.all_gradients),
            "optimizer_state": m.state,
            "activations": np.where(loss_peaks, m.saved + np.maximum(m.working - m.logits, 0.0), m.last),
            "logits": np.where(loss_peaks, m.logits, 0.0),
            "communication": m.buckets,
            "workspace": WORKSPACE_BYTES,
        },
        nccl=_nccl_bytes(x),
    )


def needed_bytes(x: Inputs) -> tuple[Number, Number]:
    """The sum of ``Memory.peak``, and its nccl: for a search that needs no breakdown."""
    m = _moments(x)
    return m.weights + m.state + m.buckets + WORKSPACE_BYTES + np.maximum(m.at_loss, m.at_end), _nccl_bytes(x)


def _moments(x: Inputs) -> _Moments:
    held = stage_parameters(x)
    ranks = x.data * x.context
    several = ranks > 1
    # Where states are sharded, all ranks together hold each parameter once, whether experts are spread or not.
    sharded = _stage_parameters(x, 1.0) / ranks
    zero1, zero2, zero3 = x.sharding >= ZERO1, x.sharding >= ZERO2, x.sharding >= ZERO3
    layer = layer_parameters_of_rank(x)

    # ZeRO-2 of PyTorch is FSDP that gathers all 16-bit weights for a forward and backward pass (SHARD_GRAD_OP) and
    # keeps their masters sharded; code with masters of their own keeps the 16-bit weights whole.
    gathers_all = (x.sharding == ZERO2) & (x.master_bytes == 0) & several
    weights = np.where(zero3 | gathers_all, sharded, held) * x.weight_bytes
    state = np.where(zero1, sharded, held) * (x.optimizer_state_bytes + x.master_bytes)
    gradients = np.where(zero2, sharded, held) * x.gradient_bytes
    # While a layer's gradients are reduced, ZeRO-2 and 3 hold that layer's whole gradients.
    reducing = np.where(zero2, layer * x.gradient_bytes, 0.0)
    buckets = np.where((x.sharding <= ZERO1) & several, held * x.bucket_bytes, 0.0)
    gathered = GATHERED_LAYERS * layer * (x.element_bytes + x.cached_bytes)
    saved, working, layer_activations = activation_bytes(x)
    first, last = _micro_batches_in_flight(x)
    logits = logits_bytes(x)
    # Autocast keeps its copies until the backward pass, which makes them again where the layers are computed again: the
    # peak is then at the end of the forward pass, when the gradient of the logits is not there yet, or after it.
    head = np.minimum(x.vocab * x.hidden / x.tensor, held)
    held_narrow = held
    kept = np.where(x.checkpointing == FULL, np.maximum((held - head) * x.cast_bytes - logits / 6.0, 0.0), 0.0)
    if np.any(x.experts > 0):  # weights that stay in 32 bits have no copy
        wide = np.where(experts_in_32_bits(x), layers_of_stage(x) * x.expert_parameters / x.expert / x.tensor, 0.0)
        kept = np.where(x.checkpointing == FULL, np.maximum(kept - wide * x.cast_bytes, 0.0), kept)
        held_narrow = held - wide
    if np.any(x.fp8_cast_bytes > 0):
        # torchao casts a layer's weights when a product reads them, and keeps no copy (h200_fp8_202611.md).
        kept = np.where(x.fp8_cast_bytes > 0, 0.0, kept)
        held_narrow = np.where(x.fp8_cast_bytes > 0, head, held_narrow)
    copied = np.where(x.checkpointing == FULL, head * x.cast_bytes + kept, held_narrow * x.cast_bytes)
    copies = np.where(gathers_all, held * x.element_bytes, copied) + held * x.cached_bytes
    cast = np.where(zero3 & several, gathered, copies)
    # Which stage is fuller: the first, or the last with its logits.
    last_is_fuller = (last - first) * saved + np.maximum(logits - working, 0.0) >= 0
    logits = np.where(last_is_fuller, logits, 0.0)
    saved = saved * np.where(last_is_fuller, last, first)
    early = np.where((x.persistent_gradients > 0) | (x.grad_accum > 1) | (x.pipeline > 1), gradients, 0.0)

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
        all_gradients=gradients + reducing,
        last=layer_activations,
    )


def updated_parameters(x: Inputs) -> Number:
    """Parameters that the fullest rank's optimizer updates."""
    return np.where(x.sharding >= ZERO1, _stage_parameters(x, 1.0) / (x.data * x.context), stage_parameters(x))


@functools.lru_cache(maxsize=1)  # memory, communication and computation of the same configurations ask for it
def stage_parameters(x: Inputs) -> Number:
    """Parameters of the fullest rank's pipeline stage, tensor slice and experts, before any sharding over data ranks.

    The first stage has the input embedding and the last the output projection; with tied embeddings both keep a copy,
    so the fullest stage has its layers and one table.
    """
    return _stage_parameters(x, x.expert)


def _stage_parameters(x: Inputs, expert: Number) -> Number:
    tables = x.vocab * x.hidden
    # The first stage has the positions too.
    first = np.where(x.embedding_parameters >= 2.0 * tables, x.embedding_parameters - tables, x.embedding_parameters)
    table = np.where(x.pipeline > 1, first, x.embedding_parameters)
    return (layers_of_stage(x) * layer_parameters(x, expert) + table) / x.tensor


def layers_of_stage(x: Inputs) -> Number:
    """Layers of the fullest pipeline stage."""
    return np.ceil(x.layers / x.pipeline)


def layer_parameters_of_rank(x: Inputs) -> Number:
    """Parameters of the largest unit that ZeRO gathers at once: a layer, or the embedding if that is larger."""
    table = np.minimum(x.vocab * x.hidden, x.embedding_parameters)
    return np.maximum(layer_parameters(x, x.expert), table) / x.tensor


def layer_parameters(x: Inputs, expert: Number) -> Number:
    """Parameters of one layer where ``expert`` ranks share its experts, before any slicing over tensor ranks."""
    return x.layer_parameters - x.expert_parameters * (1.0 - 1.0 / expert)


def tokens_of_rank(x: Inputs) -> Number:
    """Tokens of one micro-batch on one rank."""
    return x.micro_batch * x.seq_len / x.context


@dataclass(frozen=True, slots=True)
class _TokenBytes:
    """Bytes that one layer saves of one token, by what divides them.

    Attributes:
        outside: of norms, dropout and router: divided by tensor ranks where they split the sequence.
        sliced: of products, activations and scores: divided by tensor ranks.
        dispatched: of the tokens that experts read: whole on each tensor rank.
        cast: a cast of the residual's width, which tensor ranks repeat.
        residual: of the layer's input.
    """

    outside: Number
    sliced: Number
    dispatched: Number
    cast: Number
    residual: Number


def _token_bytes(x: Inputs, used: Number, *, narrow: bool) -> _TokenBytes:
    """Counted tensor by tensor as in Korthikanti et al., arXiv:2205.05198, section 4, for the sizes of the elements.

    Args:
        x: configurations.
        used: experts that work on a token, 1 without experts.
        narrow: whether the code computes in 16 bits throughout, its residual stream too.
    """
    element = x.element_bytes
    residual_bytes = element if narrow else x.residual_bytes
    # A norm saves its input, its output as the matrix products read it, and (RMSNorm as Hugging Face writes it, in 32
    # bits) the normalised input; dropout saves a mask byte. Under autocast rotary positions save queries and keys once
    # more: 3.7 and 3.9 bytes of each on H200 (Llama 410M and 3.6B, torch 2.11, measured 2026-11-21).
    autocast = np.where(residual_bytes > element, 1.0, 0.0)
    eager = x.written_out * (1.0 - x.compiled)
    by_hand = x.llama_like * eager
    wide = residual_bytes * by_hand
    norms = 2.0 * (np.maximum(residual_bytes, 4.0 * by_hand) + wide + element)
    # Queries, keys, values, the attention's output (the input of the output projection).
    products = element * (2.0 * x.query + 2.0 * x.kv) + wide * autocast * (x.query + x.kv)
    if np.any(x.context > 1):  # a ring of context ranks in plain PyTorch keeps the attention's output once more
        products = products + element * x.query * ((x.context > 1) & (x.fused_kernels == 0))
    # Feed-forward: every product's output, and the activation function's output that the last product reads. A
    # compiler computes the product of the gate and what it gates again.
    gated = x.mlp_matrices > 2.5
    gelu = WRITTEN_GELU_TENSORS * residual_bytes * (eager * x.causal * (1.0 - gated))
    of_expert: Number = element if narrow else np.where(_products_miss_autocast(x), 4.0, element)
    inner = of_expert * (x.mlp_matrices + gated * (1.0 - x.compiled)) + gelu
    # A mixture: the router's logits and probabilities in 32 bits, the copy of the tokens that the experts read (whole
    # on each tensor rank), and the experts' outputs that their weights are multiplied with.
    dispatched = of_expert * x.hidden * np.where(x.experts > 0, 1.0, 0.0) * used
    # Unfused attention: a score's softmax (in PyTorch 32 bits), what the product reads where that is another
    # tensor (16 bits, or after dropout), and a mask byte. Where no fused kernel takes it, 4.2 bytes a score in 32 bits
    # and 5.1 by a compiler on H200 (Llama 1B in tf32 and BERT base, torch 2.11, 2026-11-21).
    softmax = np.maximum(x.residual_bytes, 4.0 * x.written_out)
    copied = np.where(softmax > element, element, element * x.dropout)
    a_score = (1.0 - x.flash) * (softmax + copied + x.dropout) + x.flash * (
        grouped_in_32_bits(x) * softmax + scores_by_compiler(x) * (2.0 * element + 1.0)
    )
    return _TokenBytes(
        outside=x.hidden * (norms + 2.0 * x.dropout) + 8.0 * x.experts + dispatched,
        sliced=products + x.heads * x.seq_len * a_score + inner * x.ffn * used,
        dispatched=dispatched,
        # Autocast casts a norm's output for each of the five products that read it.
        cast=by_hand * autocast * element * x.hidden,
        residual=residual_bytes * x.hidden,
    )


def activation_bytes(x: Inputs) -> tuple[Number, Number, Number]:
    """Bytes one micro-batch saves in a stage, bytes of one layer's own backward pass, and of one layer unsaved."""
    fsdp = computes_narrow(x)
    if not np.any(fsdp):
        return _activation_bytes(x, narrow=False)
    if np.all(fsdp):
        return _activation_bytes(x, narrow=True)
    # Of all shardings there are these two: where a grid crosses them with layouts, each is worked out once.
    narrow, wide = _activation_bytes(x, narrow=True), _activation_bytes(x, narrow=False)
    saved, working, layer = (np.where(fsdp, a, b) for a, b in zip(narrow, wide, strict=True))
    return saved, working, layer


def _activation_bytes(x: Inputs, *, narrow: bool) -> tuple[Number, Number, Number]:
    """Of code that computes ``narrow`` (``computes_narrow``), or that does not."""
    tokens = tokens_of_rank(x)
    element = x.element_bytes
    split = np.where(x.sequence_parallel > 0, x.tensor, 1.0)
    # A rank of experts works on the tokens that its experts were sent.
    used = x.experts_used * np.where(x.expert > 1, EXPERT_CAPACITY, 1.0)
    of = _token_bytes(x, used, narrow=narrow)
    everything = of.outside / split + of.dispatched + of.sliced / x.tensor
    if np.any(of.cast):
        again = np.where(x.sequence_parallel > 0, REPEATED_CASTS[1], REPEATED_CASTS[0])
        everything = everything + of.cast * again * (1.0 - 1.0 / x.tensor)
    # Selective keeps each layer's input, attention's output and those of the matrix products that it does not repeat.
    up = (x.mlp_matrices - 1.0) * x.ffn * used
    kept_full = of.residual / split
    matrices = (element * x.hidden + of.dispatched) / split + element * (x.query + 2.0 * x.kv + up) / x.tensor
    kept_selective = kept_full + element * x.query / x.tensor + (1.0 - x.selective_recompute) * matrices
    per_token = np.where(
        x.checkpointing == NONE, everything, np.where(x.checkpointing == SELECTIVE, kept_selective, kept_full)
    )
    # The backward pass of one layer holds the gradients of its widest tensors beside what it reads; the sequence
    # gathered from the tensor ranks; keys, values and their gradients of the context rank whose turn it is, and of the
    # next; what is sent to experts and what comes back.
    layer = everything - per_token + element * (up + x.ffn * used) / x.tensor + kept_full
    if np.any(x.sequence_parallel > 0):
        layer = layer + np.where((x.sequence_parallel > 0) & (x.tensor > 1), element * x.hidden, 0.0)
    if np.any(x.context > 1):
        layer = layer + np.where(x.context > 1, 8.0 * element * x.kv / x.tensor, 0.0)
    if np.any(x.expert > 1):
        layer = layer + np.where(x.expert > 1, 2.0 * of.dispatched / split, 0.0)

    # A model without layers is counted in samples.
    tokens = np.where(x.layers > 0, tokens, 0.0)
    samples, working_of_samples = sample_bytes(x)
    saved = tokens * per_token * layers_of_stage(x) + samples
    return saved, tokens * layer + working_of_samples, tokens * everything


def _micro_batches_in_flight(x: Inputs) -> tuple[Number, Number]:
    """Micro-batches whose activations the first and the last stage keep.

    1F1B keeps as many as there are stages to come (at most all of them) and 1 on the last stage. Interleaving v chunks
    keeps 1 + (p - 1) / (p v) times as many on the first, and all but the last chunk's warm-up on the last
    (arXiv:2104.04473, 2.2; arXiv:2205.05198, section 4.2.3).
    """
    first = np.minimum(x.pipeline, x.grad_accum)
    interleaved = x.virtual_stages > 1
    most = first * np.where(interleaved, 1.0 + (x.pipeline - 1.0) / (x.pipeline * x.virtual_stages), 1.0)
    last = np.where(interleaved, ((x.virtual_stages - 1.0) * first + 1.0) / x.virtual_stages, 1.0)
    return most, last


def logits_bytes(x: Inputs) -> Number:
    """Bytes of the logits, their upcast, log-softmax and gradients at the peak; on the last pipeline stage."""
    # FSDP compiles layer by layer, and not the loss. Plain PyTorch gathers the logits of all tensor ranks for it.
    fused = (x.compiled > 0) & np.logical_not(computes_narrow(x))
    loss_bytes = np.where(fused, np.minimum(x.loss_bytes, COMPILED_LOSS_BYTES), x.loss_bytes)
    return tokens_of_rank(x) * x.vocab * loss_bytes / np.where(x.written_out > 0, 1.0, x.tensor)


def experts_in_32_bits(x: Inputs) -> Flag:
    """Where a mixture's products run in 32 bits although the run's precision is 16.

    torch's grouped product is no autocast operation: with 32-bit weights, which autocast leaves as they are, it
    computes in 32 bits (https://github.com/pytorch/pytorch/issues/174763; transformers 5.23, integrations/moe.py,
    _grouped_mm). FSDP gathers 16-bit weights.
    """
    return _products_miss_autocast(x) & np.logical_not(computes_narrow(x))


def _products_miss_autocast(x: Inputs) -> Flag:
    return (x.autocast > 0) & (x.grouped_experts > 0) & (x.experts > 0)


def grouped_in_32_bits(x: Inputs) -> Flag:
    """Where PyTorch has no fused attention: 32-bit inputs with fewer keys and values than queries."""
    return (x.written_out > 0) & (x.element_bytes > 2.0) & (x.kv < x.query)


def scores_by_compiler(x: Inputs) -> Flag:
    """Where a compiler writes the scores out: no fused attention takes Hugging Face's mask with dropout, not causal."""
    return (x.written_out > 0) & (x.compiled > 0) & (x.causal == 0) & (x.dropout > 0)


def computes_narrow(x: Inputs) -> Flag:
    """Where plain PyTorch is FSDP2, which computes in 16 bits throughout instead of under autocast."""
    return (x.written_out > 0) & (x.sharding >= ZERO2) & (x.data * x.context > 1)


def _nccl_bytes(x: Inputs) -> Number:
    groups = 1.0 * (x.data * x.context > 1) + (x.tensor > 1) + (x.pipeline > 1) + (x.context > 1) + (x.expert > 1)
    peers = np.minimum(x.expert, x.gpus_per_node) - 1.0
    return groups * NCCL_BYTES + peers * ALL_TO_ALL_BYTES_PER_PEER
