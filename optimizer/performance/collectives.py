"""Collectives of a step: their bytes, calls and ranks, and their time over a node's links and the network.

Ring bytes over bus bandwidth: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Ranks are placed
tensor first, then context, expert, data, pipeline (Megatron, torch's device mesh).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimizer.performance import kernels
from optimizer.performance.calibration import Coefficients
from optimizer.performance.case import EXPERT_CAPACITY, Case, Rates
from optimizer.performance.rates import LINK_PIECE_S
from optimizer.performance.types import DDP, ZERO1, ZERO2, ZERO3, Flag, Number

# torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
BUCKET_BYTES = 25 * 2**20
# Parameters in a bucket of Megatron's optimizer, at least and a data rank; all adapters' gradients fill few
# (bucket_size of megatron/core/distributed/distributed_data_parallel.py at d98e8a6).
LEAST_BUCKET, RANK_BUCKET = 40e6, 1e6
# FSDP2's groups of a torchvision ResNet: conv1, bn1, four stages, fc (bootstrap/trainer/parallelize.py, _shard).
CNN_GROUPS = 7.0
# One hop of a ring in NCCL's tuning model: hwLatencies, Ring, Simple, NVLINK and NET (src/graph/tuning.cc at 5067397,
# 2026-06-11).
LINK_HOP_S = 3.4e-6
NETWORK_HOP_S = 14e-6
# Nodes of one ring, beyond two, at which the network gives half. Read off the measured runs: one network efficiency
# then holds for rings of 2 to 280 nodes (ZeRO-3 of 530 billion parameters on 2,240 A100), else 0.3 to 0.8.
NODES_AT_HALF_BANDWIDTH = 200.0

Axis = Literal["tensor", "context", "expert", "pipeline", "data"]
Kind = Literal["all-reduce", "ring", "tree", "sends", "all-to-all", "stage"]


def ring_slowdown(nodes: Number) -> Number:
    """Network bandwidth of two nodes over that of a ring through ``nodes``."""
    return 1.0 + np.maximum(0.0, nodes - 2.0) / NODES_AT_HALF_BANDWIDTH


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One row of the table: collectives of one group.

    Attributes:
        axis, kind: whose ranks communicate, and how: an all-reduce (ring, or a tree between two nodes), a gather or
            reduction around the ring, a reduction with an all-reduce's latency ("tree"), sends around a ring, an all
            to all, or sends from a pipeline stage to the next.
        ranks, inner: of the group, and places between its neighbours. Of "stage", the ranks that send at once over the
            network, or 0 inside a node.
        sent, calls: bytes of the buffer, and the collectives that it is sent in.
        copies: of each element to ranks anywhere; code that sends an element once a node pays the network for one.
        a_micro_batch, a_step: how often that happens.
    """

    axis: Axis
    kind: Kind
    ranks: Number = 1.0
    inner: Number = 1.0
    sent: Number = 0.0
    calls: Number = 0.0
    copies: Number = 1.0
    a_micro_batch: Number = 0.0
    a_step: Number = 0.0

    def seconds(self, rates: Rates, local: Number, c: Coefficients) -> Number:
        """Compute the seconds of the row once, where ``local`` ranks share a node's network."""
        network = rates.network * c.network_efficiency
        if self.kind == "stage":
            sharing = np.clip(self.ranks, 1.0, local)
            outside = self.ranks > 0
            rate = np.where(outside, np.minimum(network / sharing, rates.link), rates.link)
            return self.sent / rate + self.calls * np.where(outside, rates.network_latency_s, rates.link_latency_s)
        members = np.maximum(1.0, np.minimum(self.ranks, local / self.inner))
        spans = np.ceil(self.ranks / members)
        outside = spans > 1
        across = np.minimum(rates.link, network * members / local / ring_slowdown(spans))
        rate = np.where(outside, across, rates.link)
        # Tensor ranks on several nodes wait for each other.
        late_s = self.ranks * c.tensor_hop_s if self.axis == "tensor" else 0.0
        late_s = np.where(outside, c.network_call_s if self.axis == "data" else late_s, 0.0)
        inside_s = np.where(self.ranks > 1, rates.link_latency_s, 0.0)
        on_wire: Number
        latency_s: Number
        calls, around = self.calls, (1.0 - 1.0 / self.ranks) * self.sent
        if self.kind == "ring":
            hops = (self.ranks - spans) * LINK_HOP_S + (spans - 1.0) * NETWORK_HOP_S
            latency_s = inside_s + np.where(self.ranks > 1, hops + late_s, 0.0)
            on_wire = around / rate
        elif self.kind == "sends":
            own = np.where(outside, np.minimum(network / local, rates.link), rates.link)
            latency_s = np.where(outside, rates.network_latency_s, rates.link_latency_s)
            on_wire, calls = around / own, calls * (self.ranks - 1.0)
        else:
            between_s = rates.network_latency_s * (1.0 + np.log2(spans)) + late_s
            latency_s = np.where(outside, between_s, inside_s)
            on_wire = self._on_wire(rates, around, members, spans, rate, network / local)
        # A transfer in pieces inside a node takes t + 2 sqrt(t x piece).
        piece_s = np.where(outside, 0.0, LINK_PIECE_S)
        return on_wire + 2.0 * np.sqrt(on_wire * (piece_s * calls)) + calls * latency_s

    def _on_wire(
        self, rates: Rates, around: Number, members: Number, spans: Number, rate: Number, network: Number
    ) -> Number:
        """Seconds of the bytes of a tree or an all to all, where one rank has ``network``."""
        if self.kind == "tree":
            return around / rate
        if self.kind == "all-reduce":
            # Two p4d.24xlarge reduced 1 GiB at 30.5 GB/s, four at half of that
            # (https://github.com/NVIDIA/nccl/issues/527).
            tree = np.maximum(self.sent / rate, 2.0 * around / rates.link)
            return np.where(spans == 2, tree, 2.0 * around / rate)
        # Each rank sends an equal part to every rank. Links and network work at once: 16 A100 on two nodes reached 85%
        # of their network cards' rate (https://github.com/NVIDIA/nccl/issues/1138). Of the copies of a token to one
        # node the network sees one.
        inside = (members - 1.0) / self.ranks * self.sent / rates.link
        nodes = spans * (1.0 - (1.0 - 1.0 / spans) ** self.copies) / self.copies if np.any(self.copies > 1) else 1.0
        return np.maximum(inside, (1.0 - members / self.ranks) * self.sent * nodes / network)


def collectives(x: Case) -> Iterator[tuple[str, Collective]]:
    """List the collectives of a step, by name; none is hidden yet."""
    h, layers, mixtures = x.model.hidden_size, x.model.layers, x.model.mixture_layers
    calls = 4.0 + 2.0 * x.repeats
    if np.any(x.tensor > 1):
        # Two all-reduces a pass; with the sequence split, a gather and a reduction of the same bytes each.
        reduced = (2.0 + x.repeats) * 2.0 * layers
        splits = x.sequence_parallel > 0
        # The backward pass gathers the split inputs of two products once more (arXiv:2205.05198, 4.2.2).
        if x.code.regathers_sequence:
            reduced = reduced + np.where(splits, layers, 0.0)
        yield "tensor", Collective(
            axis="tensor", kind="all-reduce", ranks=x.tensor, sent=reduced * x.tokens * h * x.element,
            calls=calls * layers * np.where(splits, 2.0, 1.0), a_micro_batch=1.0,
        )  # fmt: skip
    if np.any(x.context > 1):
        # A ring passes keys and values once forward, and with their gradients backward.
        passes = (3.0 + x.repeats) * layers
        keys_and_values = x.context * x.tokens * 2.0 * x.kv / x.tensor * x.element
        yield "context", Collective(
            axis="context", kind="sends", ranks=x.context, inner=x.tensor, sent=passes * keys_and_values, calls=passes,
            a_micro_batch=1.0,
        )  # fmt: skip
    if np.any(x.expert > 1):
        # Tokens go to their experts and back, forward and backward; all wait for the fullest rank.
        sent = x.model.experts_per_token * x.tokens * h / x.tensor * x.element * EXPERT_CAPACITY
        shown = kernels.FUSED_EXCHANGE * (x.recipe.graphs != "fused") if x.code.fused_kernels else 1.0
        yield "expert", Collective(
            axis="expert", kind="all-to-all", ranks=x.expert, inner=x.expert_slices * x.context,
            sent=calls * mixtures * sent, calls=calls * mixtures, a_micro_batch=shown,
            copies=float(x.model.experts_per_token) if x.code.fused_kernels else 1.0,
        )  # fmt: skip
    if np.any(x.pipeline > 1):
        # The slowest send sets the pace. Tensor ranks send a slice each (arXiv:2104.04473, 4.1). Autocast keeps the
        # residual in 32 bits.
        sent = 2.0 * x.tokens * h * np.maximum(x.element, x.residual) / x.tensor
        yield "pipeline", Collective(
            axis="pipeline", kind="stage", ranks=np.where(x.nodes > 1, x.ranks * x.tensor, 0.0),
            sent=x.virtual_stages * sent, calls=x.virtual_stages * 2.0,
            a_micro_batch=np.where(x.pipeline > 1, 1.0, 0.0),
        )  # fmt: skip
    # Experts' gradients are reduced over the ranks with the same experts.
    spread = np.where(x.expert > 1, 1.0, 0.0)
    yield from _data_collectives(x, "", x.ranks, x.tensor, x.stage_parameters - spread * x.rank_experts, 1.0)
    if np.any(x.expert > 1):
        same = np.maximum(x.ranks * x.tensor / x.expert_slices / x.expert, 1.0)
        yield from _data_collectives(x, "experts' ", same, x.expert_slices * x.expert, x.rank_experts, spread)


def _data_collectives(
    x: Case, whose: str, ranks: Number, inner: Number, parameters: Number, share: Number
) -> Iterator[tuple[str, Collective]]:
    """List the collectives that data ranks run over these parameters; ``share`` scales their number."""
    groups = x.code.gathers_per_layer * x.stage_layers + 1.0
    if x.code.fused_kernels and not x.recipe.tuning.trains_all:
        groups = np.minimum(groups, np.ceil(parameters * x.trained / np.maximum(LEAST_BUCKET, ranks * RANK_BUCKET)))
    if x.model.architecture == "cnn":
        groups = CNN_GROUPS
    reduced = parameters * x.reduce_bytes
    zero1, zero2, zero3 = x.sharding == ZERO1, x.sharding >= ZERO2, x.sharding >= ZERO3
    # ZeRO-1 on DDP (ZeroRedundancyOptimizer) sends updated parameters; else (FSDP2) shards are reduced and gathered.
    on_ddp = (x.bucket_bytes > 0) & np.logical_not(x.uses_fully_shard)
    on_shards = zero1 & np.logical_not(on_ddp)
    # ZeRO-2 and 3 reduce in every micro-batch, ZeRO-3 and FSDP's ZeRO-2 that reshards after it also gather there.
    reshards = float(x.master_bytes == 0 and not x.code.compiles_layers)
    again = x.repeats if x.code.gathers_per_layer > 1 else 0.0
    gathers = np.where(zero2, np.where(zero3, 2.0 + again, reshards), 0.0)
    gathers_once = on_shards | (zero2 & (gathers == 0))

    def row(kind: Kind, sent: Number, calls: Number, a_micro_batch: Number, a_step: Flag) -> Collective:
        return Collective(
            axis="data", kind=kind, ranks=ranks, inner=inner, sent=sent, calls=calls,
            a_micro_batch=share * a_micro_batch, a_step=np.where(a_step, share, 0.0),
        )  # fmt: skip

    buckets = np.ceil(reduced / BUCKET_BYTES)
    yield f"{whose}all-reduce", row("all-reduce", reduced, buckets, 0.0, (x.sharding == DDP) | (zero1 & on_ddp))
    hooked = on_shards & x.code.hook_shards
    reductions = np.where(zero2, 1.0, 0.0)
    yield f"{whose}reduce-scatter", row("ring", reduced, groups, reductions, on_shards & np.logical_not(hooked))
    # FSDP2 gathers frozen weights with the trained ones.
    sent_share = 1.0 if x.code.fsdp2 else x.trained
    gathered = parameters * sent_share * min(x.gathered_bytes, x.weight_bytes)
    yield f"{whose}gather", row("ring", gathered, groups, gathers, gathers_once)
    if x.code.hook_shards:
        yield f"{whose}reduce-scatter in hooks", row("tree", reduced, buckets, 0.0, hooked)
    if x.bucket_bytes > 0:
        yield f"{whose}gather of updates", row("ring", parameters * x.weight_bytes, groups, 0.0, zero1 & on_ddp)
