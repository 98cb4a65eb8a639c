"""Seconds that a rank communicates in a step, by kind of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.performance import gradient_compression
from optimizer.performance.activations import EXPERT_CAPACITY
from optimizer.performance.collectives import Communicator, communicator
from optimizer.performance.inputs import Inputs
from optimizer.performance.stage import (
    layers_of_stage,
    mixture_layers_of_stage,
    residual_bytes,
    shards_by_fsdp2,
    stage_parameters,
    tokens_of_rank,
)
from optimizer.performance.types import FULL, ZERO1, ZERO2, ZERO3, Number

# torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
BUCKET_BYTES = 25 * 2**20
# FSDP2's groups of a torchvision ResNet: conv1, bn1, four stages, fc (bootstrap/trainer/parallelize.py, _shard).
CNN_GROUPS = 7.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Seconds on one rank, none hidden: of all layers, or (``pipeline``) between two stages."""

    data_per_micro_batch: Number
    data_per_step: Number
    tensor: Number
    context: Number
    expert: Number
    pipeline: Number


def communication(x: Inputs) -> Communication:
    """Compute the seconds of one rank's communication."""
    network, local = _network(x)
    tokens = tokens_of_rank(x)
    again = np.where(x.checkpointing == FULL, 1.0, 0.0)

    tensor: Number = 0.0
    context: Number = 0.0
    expert: Number = 0.0
    pipeline: Number = 0.0
    if np.any(x.tensor > 1):
        # Two all-reduces a pass; with the sequence split, a gather and a reduction of the same bytes each.
        late_s = x.tensor * x.coefficients.tensor_hop_s
        ranks = communicator(x, network, local, x.tensor, inner=1.0, call_s=late_s)
        copies = np.where(x.expert > 1, x.experts_used, 1.0)
        reduced = (2.0 + again) * (2.0 * x.layers + x.mixture_layers * (copies - 1.0))
        calls = (4.0 + 2.0 * again) * x.layers * np.where(x.sequence_parallel > 0, 2.0, 1.0)
        # The backward pass gathers the split inputs of two products once more (arXiv:2205.05198, 4.2.2).
        reduced = reduced + np.where((x.sequence_parallel > 0) & (x.regathers_sequence > 0), x.layers, 0.0)
        tensor = ranks.all_reduce(reduced * tokens * x.hidden * x.element_bytes, calls)
    if np.any(x.context > 1):
        # A ring passes keys and values once forward, and with their gradients backward.
        ranks = communicator(x, network, local, x.context, inner=x.tensor)
        passes = (3.0 + again) * x.layers
        keys_and_values = x.context * tokens * 2.0 * x.kv / x.tensor * x.element_bytes
        context = ranks.ring_of_sends(passes * keys_and_values, passes)
    if np.any(x.expert > 1):
        # Tokens go to their experts and back, forward and backward; all wait for the fullest rank.
        ranks = communicator(x, network, local, x.expert, inner=x.tensor * x.context)
        calls = (4.0 + 2.0 * again) * x.mixture_layers
        expert = ranks.all_to_all(
            calls * x.experts_used * tokens * x.hidden / x.tensor * x.element_bytes * EXPERT_CAPACITY, calls
        )
    if np.any(x.pipeline > 1):
        # The slowest send sets the pace. Tensor ranks send a slice each (arXiv:2104.04473, 4.1).
        stage_ranks = x.data * x.tensor * x.context
        outside = x.nodes > 1
        across = np.minimum(network / np.minimum(stage_ranks, local), x.link_byte_per_s)
        p2p = np.where(outside, across, x.link_byte_per_s)
        latency: Number = np.where(outside, x.network_latency_s, x.link_latency_s)
        # Autocast keeps the residual in 32 bits.
        element = np.maximum(x.element_bytes, residual_bytes(x))
        sent = 2.0 * tokens * x.hidden * element / x.tensor
        pipeline = np.where(x.pipeline > 1, x.virtual_stages * (sent / p2p + 2.0 * latency), 0.0)

    per_micro_batch, per_step = _over_data_ranks(x, network, local)
    return Communication(
        data_per_micro_batch=per_micro_batch,
        data_per_step=per_step,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
    )


def data_communication(x: Inputs) -> tuple[Number, Number]:
    """Compute ``Communication.data_per_micro_batch`` and ``data_per_step`` alone."""
    return _over_data_ranks(x, *_network(x))


def buckets(reduced_bytes: Number) -> Number:
    """DDP's buckets of gradients."""
    return np.ceil(reduced_bytes / BUCKET_BYTES)


def _over_data_ranks(x: Inputs, network: Number, local: Number) -> tuple[Number, Number]:
    ranks = x.data * x.context
    call_s = x.coefficients.network_call_s
    everyone = communicator(x, network, local, ranks, inner=x.tensor, call_s=call_s)
    held = stage_parameters(x)
    if np.any(x.expert > 1):
        # Experts' gradients are reduced over the ranks with the same experts.
        of_experts = np.maximum(ranks / x.expert, 1.0)
        same = communicator(x, network, local, of_experts, inner=x.tensor * x.expert, call_s=call_s)
        experts = mixture_layers_of_stage(x) * x.expert_parameters / x.expert / x.tensor
        # Independent of the rest of the grid: no expert ranks, one collective.
        spread = np.where(x.expert > 1, 1.0, 0.0)
        of_others, of_experts = _data_seconds(x, everyone, held - spread * experts), _data_seconds(x, same, experts)
        per_micro_batch, per_step = (a + spread * b for a, b in zip(of_others, of_experts, strict=True))
        return per_micro_batch, per_step
    return _data_seconds(x, everyone, held)


def _network(x: Inputs) -> tuple[Number, Number]:
    local = np.maximum(
        1.0, np.minimum(x.data * x.tensor * x.pipeline * x.context / np.maximum(x.nodes, 1.0), x.gpus_per_node)
    )
    return x.network_byte_per_s * x.coefficients.network_efficiency, local


def _data_seconds(x: Inputs, ranks: Communicator, parameters: Number) -> tuple[Number, Number]:
    is_cnn = (x.layers == 0) & (x.convolutions > 0)
    layers = np.where(is_cnn, CNN_GROUPS, x.gathers_per_layer * layers_of_stage(x) + 1.0)
    reduced = parameters * x.reduce_bytes
    ring = ranks.ring(parameters, layers)
    reduce_scatter = ring(x.reduce_bytes)
    gather = ring(np.minimum(x.gathered_bytes, x.weight_bytes))
    # ZeRO-1 on DDP (ZeroRedundancyOptimizer) sends updated parameters; else (FSDP2) shards are reduced and gathered.
    sent, calls = reduced, buckets(reduced)
    if gradient_compression.compresses(x):
        sent, calls = gradient_compression.sent_bytes(x, reduced), gradient_compression.all_reduces(x, calls)
    all_reduce = ranks.all_reduce(sent, calls)
    on_ddp = (x.bucket_bytes > 0) & np.logical_not(shards_by_fsdp2(x))
    in_hook = ranks.reduce_scatter(reduced, buckets(reduced))
    sharded = np.where(x.hook_shards > 0, in_hook, reduce_scatter) + gather
    zero1 = np.where(on_ddp, all_reduce + ring(x.weight_bytes), sharded)
    # ZeRO-2 and 3 reduce in every micro-batch, ZeRO-3 and FSDP's ZeRO-2 that reshards after it also gather there.
    zero2, zero3 = x.sharding >= ZERO2, x.sharding >= ZERO3
    regathers = np.where(
        zero3,
        2.0 + x.gathers_again * np.where(x.checkpointing == FULL, 1.0, 0.0),
        np.where((x.master_bytes == 0) & (x.marks_last == 0), 1.0, 0.0),
    )
    per_micro_batch = np.where(zero2, reduce_scatter + regathers * gather, 0.0)
    once = np.where(regathers > 0, 0.0, gather)
    per_step = np.where(zero2, once, np.where(x.sharding >= ZERO1, zero1, all_reduce))
    return per_micro_batch, per_step
