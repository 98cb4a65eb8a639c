"""Collectives: bytes, bandwidth and time, over NVLink or PCIe inside a node and over the network between nodes.

A ring over n ranks sends (n - 1) / n of the buffer in a gather or a reduce-scatter, twice that in an all-reduce; time
is those bytes over the bus bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
Ranks are placed tensor first, then context, expert, data, pipeline, as Megatron and torch's device mesh do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from optimizer.errors import DataMissingError
from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.memory import (
    EXPERT_CAPACITY,
    computes_narrow,
    layers_of_stage,
    stage_parameters,
    tokens_of_rank,
)
from optimizer.performance.types import FULL, ZERO1, ZERO2, ZERO3, Hardware

# All-reduce bus bandwidth over one direction of a GPU's NVLink (half of the datasheet's figure, which counts both):
# A100 230.8 of 300 GB/s on 8 GPUs (https://github.com/NVIDIA/nccl/issues/527, p4d.24xlarge, 2022-07-25); H200 351 of
# 450 GB/s on 4 GPUs (1 GiB, NVLS off, torch 2.11, measured 2026-11-21). What the pieces below take comes on top.
NVLINK_EFFICIENCY = 0.79
# Two H200 reached 38, 170, 258, 297 and 323 GB/s at 1, 8, 64, 256 and 1024 MiB (tests/benchmarks/results,
# smoke_2xh200_202611.md): with these two numbers 42, 145, 259, 305 and 330; four H200 160 at 8 MiB, with them 169.
NVLINK_LATENCY_S = 15e-6
LINK_PIECE_S = 4e-6
# PCIe: 28 GB/s on 8 RTX 5090 in gen 5 slots of 63 GB/s a direction (https://github.com/NVIDIA/nccl/issues/1639,
# 2025-03-14): every byte crosses the host. Slots by architecture: gen 3 15.75 GB/s, gen 4 31.5, gen 5 63.
PCIE_GB_PER_S = {"Volta": 15.75, "Turing": 15.75, "Ampere": 31.5, "Ada": 31.5, "Hopper": 63.0, "Blackwell": 63.0}
PCIE_EFFICIENCY = 0.44
# 8 bytes on 8 RTX 4090 took 42 us (https://github.com/NVIDIA/nccl/issues/1530).
PCIE_LATENCY_S = 42e-6
# Across nodes, growing with the logarithm of their number: 8 bytes took 51 us on 2 p6-b200.48xlarge
# (https://github.com/dstackai/dstack/pull/3961, 2026-06-12), 64 bytes 164 us on 4 p4d.24xlarge (nccl issue 527). TCP is
# slower; no figure is at hand, and its bandwidth decides.
NETWORK_LATENCY_S = 50e-6
# EFA: 29.6 GB/s of 50 GB/s on 4 p4d.24xlarge (https://github.com/NVIDIA/nccl/issues/527, 2022-07-25) and 6 to 8 of
# 12.5 GB/s on 8 to 32 p3dn.24xlarge (https://github.com/NVIDIA/nccl/issues/235, 2019-07-16). TCP: 4.7 of 12.5 GB/s on
# p3dn.24xlarge (https://github.com/NVIDIA/nccl/issues/398, 2020-10-06).
EFA_EFFICIENCY = 0.59
TCP_EFFICIENCY = 0.38

# One hop of a ring in NCCL's own tuning model: hwLatencies, Ring, Simple protocol, NVLINK and NET (src/graph/tuning.cc
# at 5067397, 2026-06-11).
LINK_HOP_S = 3.4e-6
NETWORK_HOP_S = 14e-6
# Nodes of one ring, beyond two, at which the network gives half: paths collide, and the slowest node holds up the ring.
# Read off the measured runs: with it, one network efficiency holds for rings of 2 to 280 nodes (ZeRO-3 of 530 billion
# parameters on 2,240 A100 among them), without it they need 0.3 to 0.8.
NODES_AT_HALF_BANDWIDTH = 200.0

# PyTorch's reducer fills buckets of 25 MiB (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb).
BUCKET_BYTES = 25 * 2**20


def link_of(hardware: Hardware) -> tuple[float, float]:
    """Bus bandwidth (byte/s) and latency (s) of collectives among the GPUs of one node.

    Raises:
        DataMissingError: PCIe-linked GPUs of an architecture without a known slot.
    """
    if hardware.interconnect in ("nvlink", "nvswitch") and hardware.gpu.nvlink_gb_per_s > 0:
        return hardware.gpu.nvlink_gb_per_s / 2 * NVLINK_EFFICIENCY * 1e9, NVLINK_LATENCY_S
    for architecture, gb_per_s in PCIE_GB_PER_S.items():
        if hardware.gpu.architecture.startswith(architecture):
            return gb_per_s * PCIE_EFFICIENCY * 1e9, PCIE_LATENCY_S
    raise DataMissingError(
        f"GPU architecture {hardware.gpu.architecture!r} has no PCIe generation on record",
        limit=f"known: {', '.join(PCIE_GB_PER_S)}",
        next_step="add it to PCIE_GB_PER_S in optimizer/performance/communication.py, with its source",
    )


def network_of(hardware: Hardware) -> tuple[float, float]:
    """Bandwidth (byte/s) that collectives get from one node's network, and their latency (s)."""
    efficiency = EFA_EFFICIENCY if hardware.efa else TCP_EFFICIENCY
    return hardware.network_gbit_per_s * 1e9 / 8 * efficiency, NETWORK_LATENCY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Seconds of communication on one rank.

    Attributes:
        data_per_micro_batch: gathers and reductions over data ranks that every micro-batch does.
        data_per_step: those an optimizer step does once.
        tensor: collectives of tensor parallelism, all layers of the model, one micro-batch.
        context: key-value exchange of context parallelism, all layers, one micro-batch.
        expert: exchange of tokens between experts' ranks, all layers, one micro-batch.
        pipeline: sends between two neighbouring stages, forward and backward, one micro-batch.
    """

    data_per_micro_batch: Number
    data_per_step: Number
    tensor: Number
    context: Number
    expert: Number
    pipeline: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate, and what their collectives get.

    Attributes:
        ranks: of the group.
        members: of them on one node.
        spans: nodes.
        byte_per_s: bus bandwidth of a ring through the group.
        link_byte_per_s: bus bandwidth inside a node.
        network_byte_per_s: share of a node's network that one rank has when all of them exchange.
        link_latency_s: of one call inside a node.
        network_latency_s: of one call between two nodes.
        piece_s: time of one piece, which a pipeline of pieces pays at its ends; 0 between nodes.
    """

    ranks: Number
    members: Number
    spans: Number
    byte_per_s: Number
    link_byte_per_s: Number
    network_byte_per_s: Number
    link_latency_s: Number
    network_latency_s: Number
    piece_s: Number

    def _latency_s(self) -> Number:
        """Of one call over a tree; 0 where the group is one rank."""
        inside = np.where(self.ranks > 1, self.link_latency_s, 0.0)
        return np.where(self.spans > 1, self.network_latency_s * (1.0 + np.log2(self.spans)), inside)

    def _ring_latency_s(self) -> Number:
        """Of one gather or reduce-scatter, whose data pass through every rank of the group."""
        hops = (self.ranks - self.spans) * LINK_HOP_S + (self.spans - 1.0) * NETWORK_HOP_S
        return np.where(self.ranks > 1, self.link_latency_s + hops, 0.0)

    def _seconds(self, on_wire: Number, calls: Number, latency_s: Number) -> Number:
        """Time of ``calls`` collectives that are ``on_wire`` seconds of bytes together.

        A transfer cut into pieces that follow each other takes t + 2 sqrt(t x piece): large ones come near to the
        bandwidth, small ones do not.
        """
        return on_wire + 2.0 * np.sqrt(on_wire * (self.piece_s * calls)) + calls * latency_s

    def ring(self, elements: Number, calls: Number = 1.0) -> Callable[[Number], Number]:
        """Seconds to gather or reduce a buffer of ``elements``, in ``calls`` parts, by the bytes of an element."""
        on_wire = (1.0 - 1.0 / self.ranks) * elements / self.byte_per_s
        in_pieces = 2.0 * np.sqrt(on_wire * (self.piece_s * calls))
        latency_s = calls * self._ring_latency_s()
        return lambda element_bytes: element_bytes * on_wire + np.sqrt(element_bytes) * in_pieces + latency_s

    def reduce_scatter(self, number_of_bytes: Number, calls: Number = 1.0) -> Number:
        """Seconds to reduce a buffer of ``number_of_bytes``, in ``calls`` parts, each rank getting its share."""
        return self.ring(number_of_bytes, calls)(1.0)

    # A gather moves the same bytes over the same ring.
    all_gather = reduce_scatter

    def ring_of_sends(self, number_of_bytes: Number, rounds: Number = 1.0) -> Number:
        """Seconds in which each rank's part goes from neighbour to neighbour until all have had it, in ``rounds``.

        These are sends between two ranks, not a collective that cuts its buffer over all cards of a node: where the
        ring crosses to the next node, it does over one rank's share of the network.
        """
        outside = self.spans > 1
        byte_per_s = np.where(outside, np.minimum(self.network_byte_per_s, self.link_byte_per_s), self.link_byte_per_s)
        latency_s = np.where(outside, self.network_latency_s, self.link_latency_s)
        return self._seconds(
            (1.0 - 1.0 / self.ranks) * number_of_bytes / byte_per_s, rounds * (self.ranks - 1.0), latency_s
        )

    def all_reduce(self, number_of_bytes: Number, calls: Number = 1.0) -> Number:
        """Seconds to reduce a buffer on all ranks: a ring, or between two nodes a tree, which crosses only once.

        Two p4d.24xlarge reduced 1 GiB at 30.5 GB/s, four at half of that (https://github.com/NVIDIA/nccl/issues/527).
        """
        ring = 2.0 * (1.0 - 1.0 / self.ranks) * number_of_bytes
        tree = np.maximum(number_of_bytes / self.byte_per_s, ring / self.link_byte_per_s)
        return self._seconds(np.where(self.spans == 2, tree, ring / self.byte_per_s), calls, self._latency_s())

    def all_to_all(self, number_of_bytes: Number, calls: Number = 1.0) -> Number:
        """Seconds in which each rank sends ``number_of_bytes``, an equal part to every rank, itself included.

        What stays in the node takes the links, the rest the network at once: 16 A100 on two nodes reached 85% of their
        network cards' rate (https://github.com/NVIDIA/nccl/issues/1138).
        """
        inside = (self.members - 1.0) / self.ranks * number_of_bytes / self.link_byte_per_s
        outside = (1.0 - self.members / self.ranks) * number_of_bytes / self.network_byte_per_s
        return self._seconds(np.maximum(inside, outside), calls, self._latency_s())


def communication(x: Inputs) -> Communication:
    """Seconds of one rank's communication, none of it hidden yet."""
    network, local = _network(x)
    tokens = tokens_of_rank(x)
    again = np.where(x.checkpointing == FULL, 1.0, 0.0)

    tensor: Number = 0.0
    context: Number = 0.0
    expert: Number = 0.0
    pipeline: Number = 0.0
    if np.any(x.tensor > 1):
        # Two all-reduces forward, two backward, two when the forward pass is recomputed; where the sequence is split
        # each is a gather and a reduction of the same bytes. The feed-forward block's carry what experts were sent.
        group = group_of(x, network, local, x.tensor, inner=1.0)
        reduced = (2.0 + again) * x.layers * (1.0 + np.where(x.expert > 1, x.experts_used, 1.0))
        calls = (4.0 + 2.0 * again) * x.layers * np.where(x.sequence_parallel > 0, 2.0, 1.0)
        tensor = group.all_reduce(reduced * tokens * x.hidden * x.element_bytes, calls)
    if np.any(x.context > 1):
        # A ring passes every rank's keys and values once forward, and they and their gradients backward.
        group = group_of(x, network, local, x.context, inner=x.tensor)
        passes = (3.0 + again) * x.layers
        keys_and_values = x.context * tokens * 2.0 * x.kv / x.tensor * x.element_bytes
        context = group.ring_of_sends(passes * keys_and_values, passes)
    if np.any(x.expert > 1):
        # Tokens go to their experts and come back, forward and backward; the fullest rank is waited for.
        group = group_of(x, network, local, x.expert, inner=x.tensor * x.context)
        calls = (4.0 + 2.0 * again) * x.layers
        expert = group.all_to_all(
            calls * x.experts_used * tokens * x.hidden / x.tensor * x.element_bytes * EXPERT_CAPACITY, calls
        )
    if np.any(x.pipeline > 1):
        # The slowest send holds up the others: the one to the next node, where there is one, over what the ranks of a
        # stage share there. Tensor ranks send a slice each and gather it over NVLink (arXiv:2104.04473, 4.1).
        stage_ranks = x.data * x.tensor * x.context
        outside = x.nodes > 1
        across = np.minimum(network / np.minimum(stage_ranks, local), x.link_byte_per_s)
        p2p = np.where(outside, across, x.link_byte_per_s)
        latency: Number = np.where(outside, x.network_latency_s, x.link_latency_s)
        # What is sent is the residual stream, which autocast keeps in 32 bits.
        element = np.where(computes_narrow(x), x.element_bytes, np.maximum(x.element_bytes, x.residual_bytes))
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
    """``Communication.data_per_micro_batch`` and ``data_per_step`` alone.

    Data and context ranks hold the same weights and reduce their gradients together: their product counts.
    """
    return _over_data_ranks(x, *_network(x))


def _over_data_ranks(x: Inputs, network: Number, local: Number) -> tuple[Number, Number]:
    ranks = x.data * x.context
    everyone = group_of(x, network, local, ranks, inner=x.tensor)
    held = stage_parameters(x)
    if np.any(x.expert > 1):
        # Experts' gradients are those of the ranks that hold the same experts.
        same = group_of(x, network, local, np.maximum(ranks / x.expert, 1.0), inner=x.tensor * x.expert)
        experts = layers_of_stage(x) * x.expert_parameters / x.expert / x.tensor
        # A configuration must not depend on what else is in the grid: without expert ranks there is one collective.
        spread = np.where(x.expert > 1, 1.0, 0.0)
        of_others, of_experts = _data_seconds(x, everyone, held - spread * experts), _data_seconds(x, same, experts)
        per_micro_batch, per_step = (a + spread * b for a, b in zip(of_others, of_experts, strict=True))
        return per_micro_batch, per_step
    return _data_seconds(x, everyone, held)


def _network(x: Inputs) -> tuple[Number, Number]:
    """Bandwidth of one node's network that collectives get, byte/s, and ranks of one node."""
    local = np.maximum(
        1.0, np.minimum(x.data * x.tensor * x.pipeline * x.context / np.maximum(x.nodes, 1.0), x.gpus_per_node)
    )
    return x.network_byte_per_s * x.coefficients.network_efficiency, local


def _data_seconds(x: Inputs, group: Group, parameters: Number) -> tuple[Number, Number]:
    """Gradients and, from ZeRO-1 on, parameters over data ranks: seconds of each micro-batch, and once a step."""
    layers = x.gathers_per_layer * layers_of_stage(x) + 1.0
    reduced = parameters * x.reduce_bytes
    ring = group.ring(parameters, layers)
    reduce_scatter = ring(x.reduce_bytes)
    gather = ring(np.minimum(x.element_bytes, x.weight_bytes))
    # DDP reduces buckets. ZeRO-1 on top of it (ZeroRedundancyOptimizer) then sends the updated parameters; where there
    # is no DDP the gradients are reduced to their shard, and the updated parameters gathered.
    all_reduce = group.all_reduce(reduced, np.ceil(reduced / BUCKET_BYTES))
    on_ddp = x.bucket_bytes > 0
    zero1 = np.where(on_ddp, all_reduce + ring(x.weight_bytes), reduce_scatter + gather)
    # ZeRO-2 and 3 reduce in every micro-batch; ZeRO-3 also gathers forward and backward. ZeRO-2 gathers the updated
    # parameters once, where it is FSDP's in every micro-batch.
    zero2, zero3 = x.sharding >= ZERO2, x.sharding >= ZERO3
    regathers = np.where(
        zero3,
        2.0 + x.gathers_again * np.where(x.checkpointing == FULL, 1.0, 0.0),
        np.where(x.master_bytes == 0, 1.0, 0.0),
    )
    per_micro_batch = np.where(zero2, reduce_scatter + regathers * gather, 0.0)
    once = np.where(regathers > 0, 0.0, gather)
    per_step = np.where(zero2, once, np.where(x.sharding >= ZERO1, zero1, all_reduce))
    return per_micro_batch, per_step


def group_of(x: Inputs, network: Number, local: Number, ranks: Number, inner: Number) -> Group:
    """The group of ``ranks`` whose neighbours are ``inner`` places apart.

    A group within a node has the node's links. One that spans nodes has the network, which the groups side by side on
    a node share: with ``members`` of the group on each node, local / members groups do.

    Args:
        x: configurations.
        network: bandwidth of one node's network that collectives get, byte/s.
        local: ranks of one node.
        ranks: of the group.
        inner: ranks of the kinds of parallelism placed closer together.
    """
    members = np.maximum(1.0, np.minimum(ranks, local / inner))
    spans = np.ceil(ranks / members)
    outside = spans > 1
    shared = network * members / local / (1.0 + (spans - 2.0) / NODES_AT_HALF_BANDWIDTH)
    across = np.minimum(x.link_byte_per_s, shared)
    return Group(
        ranks=ranks,
        members=members,
        spans=spans,
        byte_per_s=np.where(outside, across, x.link_byte_per_s),
        link_byte_per_s=x.link_byte_per_s,
        network_byte_per_s=network / local,
        link_latency_s=x.link_latency_s,
        network_latency_s=x.network_latency_s,
        piece_s=np.where(outside, 0.0, LINK_PIECE_S),
    )
