"""Table of the numbers in the equations: one column a quantity, one value a column or one a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.contract.units import GIB
from optimizer.performance.types import Number

if TYPE_CHECKING:
    from optimizer.workload.profile.records import ModuleProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Fitted numbers (calibration.py)."""

    matmul_efficiency: Number
    matmul_traffic: Number
    attention_efficiency: Number
    elementwise_traffic: Number
    overhead: Number
    kernel_s: Number
    host_s_per_layer: Number
    host_s_per_step: Number
    exposed_communication: Number
    network_efficiency: Number
    network_call_s: Number
    tensor_hop_s: Number
    pipeline_hop_s: Number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """One column a quantity; flags are 0 or 1. Compared by identity, to be keys of caches."""

    # ModelSpec
    parameters: Number
    active_parameters: Number
    layers: Number
    hidden: Number
    query: Number
    kv: Number
    heads: Number
    ffn: Number  # of one expert
    shared_ffn: Number  # widths that a token passes through, mean of the layers: all but routed experts
    routed_ffn: Number
    mlp_matrices: Number
    experts_used: Number
    layer_matrix: Number
    layer_parameters: Number
    experts: Number
    expert_parameters: Number
    mixture_layers: Number
    dense_layer_parameters: Number
    latent: Number
    norms: Number
    input_casts: Number  # 16-bit copies of a norm's output, a token and layer, that products keep beyond the first
    sublayers: Number  # attentions and feed-forward blocks of a layer
    head_norms: Number
    windowed: Number  # share of the layers whose window is shorter than the sequence
    window_scores: Number  # share of causal scores in such a window
    soft_cap: Number
    sinks: Number
    logits_soft_cap: Number
    embedding_parameters: Number
    vocab: Number
    causal: Number
    copies_heads: Number  # Whisper: queries, keys and values are copied to the kernel's order, queries scaled apart
    t5_like: Number  # norms written out, a learned bias a score, dropout within the feed-forward block
    tokens: Number  # of a sample in one layer
    keys: Number  # that a token attends to, before a causal mask
    head_tokens: Number  # of a sample that have logits
    cnn_flops: Number
    cnn_activations: Number
    convolutions: Number
    # Recipe
    seq_len: Number
    element_bytes: Number
    low_precision: Number
    optimizer_state_bytes: Number
    optimizer_traffic_bytes: Number
    flash: Number
    compiled: Number
    half_gradients: Number
    powersgd_rank: Number
    load_s_per_sample: Number  # of one rank's loader
    # Fine-tuning: share of parameters with gradients; flags of what trains, and of adapters (fine_tuning.py)
    trained: Number
    frozen_layers: Number
    trains_layers: Number
    trains_head: Number
    adapter_rank: Number
    adapts_mlp: Number
    four_bit: Number
    # Framework
    weight_bytes: Number
    master_bytes: Number
    gradient_bytes: Number
    cast_bytes: Number
    cached_bytes: Number
    gathered_bytes: Number
    reduce_bytes: Number
    bucket_bytes: Number
    persistent_gradients: Number
    residual_bytes: Number
    loss_bytes: Number
    dropout: Number
    llama_like: Number
    selective_recompute: Number
    written_out: Number
    fused_kernels: Number
    grouped_experts: Number
    autocast: Number
    overlaps_data: Number
    hook_shards: Number
    regathers_sequence: Number
    balances_stages: Number
    overlaps_tensor: Number
    gathers_per_layer: Number
    gathers_again: Number
    loss_traffic_bytes: Number
    fsdp2: Number
    own_ends: Number
    marks_last: Number
    fused_norms: Number
    fused_rotary: Number
    masks_compiled: Number
    compiles_layers: Number
    splits_logits: Number
    loss_turn_elements: Number
    # Hardware
    peak_flop_per_s: Number
    attention_flop_per_s: Number
    expert_flop_per_s: Number
    head_flop_per_s: Number
    fp32_flop_per_s: Number
    cycle_per_s: Number  # of all multiprocessors together
    throttling: Number
    quantise_bytes: Number
    fp8_cast_bytes: Number
    convolution: Number
    memory_byte_per_s: Number
    link_byte_per_s: Number
    link_latency_s: Number
    network_byte_per_s: Number
    network_latency_s: Number
    gpus_per_node: Number
    gpu_memory_bytes: Number
    # Grid
    nodes: Number
    data: Number
    tensor: Number
    pipeline: Number
    context: Number
    expert: Number
    sequence_parallel: Number
    virtual_stages: Number
    sharding: Number
    micro_batch: Number
    grad_accum: Number
    checkpointing: Number
    # Calibration
    coefficients: Coefficients
    # None if the costs follow from the columns above.
    module: ModuleProfile | None = None


def with_columns(x: Inputs, columns: Mapping[str, Number], coefficients: Mapping[str, Number]) -> Inputs:
    """Replace columns of ``x`` and of its coefficients."""
    fitted: dict[str, Any] = dict(coefficients)
    changes: dict[str, Any] = {**columns, "coefficients": replace(x.coefficients, **fitted)}
    return replace(x, **changes)


def stack(rows: Sequence[Inputs]) -> Inputs:
    """Join Inputs of single configurations into arrays, one element a row."""
    coefficients = stack_coefficients([row.coefficients for row in rows])
    return Inputs(**_stack_columns(rows, leave_out=("coefficients", "module")), coefficients=coefficients)


def stack_coefficients(rows: Sequence[Coefficients]) -> Coefficients:
    """Join coefficients into arrays, one element a row."""
    return Coefficients(**_stack_columns(rows))


def _stack_columns(rows: Sequence[Any], leave_out: Sequence[str] = ()) -> dict[str, Any]:
    names = [field.name for field in fields(rows[0]) if field.name not in leave_out]
    return {name: np.array([getattr(row, name) for row in rows], dtype=np.float64).reshape(-1) for name in names}


def to_gib(number_of_bytes: Number) -> Number:
    """Convert bytes to GiB."""
    return number_of_bytes / GIB
