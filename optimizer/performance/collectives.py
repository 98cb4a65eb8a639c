"""Collectives of one communicator: bytes, bandwidth and time over a node's links and the network.

Ring bytes over bus bandwidth: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Ranks are placed
tensor first, then context, expert, data, pipeline (Megatron, torch's device mesh).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from optimizer.performance.inputs import Inputs
from optimizer.performance.rates import LINK_PIECE_S
from optimizer.performance.types import Number

# One hop of a ring in NCCL's tuning model: hwLatencies, Ring, Simple, NVLINK and NET (src/graph/tuning.cc at 5067397,
# 2026-06-11).
LINK_HOP_S = 3.4e-6
NETWORK_HOP_S = 14e-6
# Nodes of one ring, beyond two, at which the network gives half. Read off the measured runs: one network efficiency
# then holds for rings of 2 to 280 nodes (ZeRO-3 of 530 billion parameters on 2,240 A100), else 0.3 to 0.8.
NODES_AT_HALF_BANDWIDTH = 200.0


def ring_slowdown(nodes: Number) -> Number:
    """Network bandwidth of two nodes over that of a ring through ``nodes``."""
    return 1.0 + np.maximum(0.0, nodes - 2.0) / NODES_AT_HALF_BANDWIDTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """Ranks that communicate: all, of one node (``members``), and nodes (``spans``).

    ``byte_per_s`` is the bus bandwidth of a ring through all, ``network_byte_per_s`` one rank's share of its node's
    network, ``call_s`` what a call takes beyond bytes and latency, ``piece_s`` the time of one piece of a transfer
    inside a node (0 between nodes).
    """

    ranks: Number
    members: Number
    spans: Number
    byte_per_s: Number
    link_byte_per_s: Number
    network_byte_per_s: Number
    link_latency_s: Number
    network_latency_s: Number
    call_s: Number = 0.0
    piece_s: Number

    def _latency_s(self) -> Number:
        inside = np.where(self.ranks > 1, self.link_latency_s, 0.0)
        return np.where(self.spans > 1, self.network_latency_s * (1.0 + np.log2(self.spans)) + self.call_s, inside)

    def _ring_latency_s(self) -> Number:
        hops = (self.ranks - self.spans) * LINK_HOP_S + (self.spans - 1.0) * NETWORK_HOP_S
        return np.where(self.ranks > 1, self.link_latency_s + hops + self.call_s, 0.0)

    def _seconds(self, on_wire: Number, calls: Number, latency_s: Number) -> Number:
        """Seconds of ``calls`` collectives; a transfer in pieces takes t + 2 sqrt(t x piece)."""
        return on_wire + 2.0 * np.sqrt(on_wire * (self.piece_s * calls)) + calls * latency_s

    def ring(self, elements: Number, calls: Number = 1.0) -> Callable[[Number], Number]:
        """Seconds to gather or reduce ``elements`` in ``calls`` parts, as a function of an element's bytes."""
        on_wire = (1.0 - 1.0 / self.ranks) * elements / self.byte_per_s
        in_pieces = 2.0 * np.sqrt(on_wire * (self.piece_s * calls))
        latency_s = calls * self._ring_latency_s()
        return lambda element_bytes: element_bytes * on_wire + np.sqrt(element_bytes) * in_pieces + latency_s

    def reduce_scatter(self, number_of_bytes: Number, calls: Number) -> Number:
        """Seconds to reduce ``calls`` buffers, a part on each rank, with the latency of an all-reduce's tree."""
        return self._seconds((1.0 - 1.0 / self.ranks) * number_of_bytes / self.byte_per_s, calls, self._latency_s())

    def ring_of_sends(self, number_of_bytes: Number, rounds: Number = 1.0) -> Number:
        """Seconds to pass each rank's part around the ring, over one rank's share of the network."""
        outside = self.spans > 1
        byte_per_s = np.where(outside, np.minimum(self.network_byte_per_s, self.link_byte_per_s), self.link_byte_per_s)
        latency_s = np.where(outside, self.network_latency_s, self.link_latency_s)
        return self._seconds(
            (1.0 - 1.0 / self.ranks) * number_of_bytes / byte_per_s, rounds * (self.ranks - 1.0), latency_s
        )

    def all_reduce(self, number_of_bytes: Number, calls: Number = 1.0) -> Number:
        """Seconds to reduce a buffer on all ranks: a ring, or between two nodes a tree.

        Two p4d.24xlarge reduced 1 GiB at 30.5 GB/s, four at half of that (https://github.com/NVIDIA/nccl/issues/527).
        """
        ring = 2.0 * (1.0 - 1.0 / self.ranks) * number_of_bytes
        tree = np.maximum(number_of_bytes / self.byte_per_s, ring / self.link_byte_per_s)
        return self._seconds(np.where(self.spans == 2, tree, ring / self.byte_per_s), calls, self._latency_s())

    def all_to_all(self, number_of_bytes: Number, calls: Number = 1.0) -> Number:
        """Seconds in which each rank sends ``number_of_bytes``, an equal part to every rank including itself.

        Links and network work at once: 16 A100 on two nodes reached 85% of their network cards' rate
        (https://github.com/NVIDIA/nccl/issues/1138).
        """
        inside = (self.members - 1.0) / self.ranks * number_of_bytes / self.link_byte_per_s
        outside = (1.0 - self.members / self.ranks) * number_of_bytes / self.network_byte_per_s
        return self._seconds(np.maximum(inside, outside), calls, self._latency_s())


def communicator(
    x: Inputs, network: Number, local: Number, ranks: Number, inner: Number, call_s: Number = 0.0
) -> Communicator:
    """Build the communicator of ``ranks`` whose neighbours are ``inner`` places apart.

    The communicators of a node's ``local`` ranks share its ``network``, byte/s.
    """
    members = np.maximum(1.0, np.minimum(ranks, local / inner))
    spans = np.ceil(ranks / members)
    outside = spans > 1
    shared = network * members / local / ring_slowdown(spans)
    across = np.minimum(x.link_byte_per_s, shared)
    return Communicator(
        ranks=ranks,
        members=members,
        spans=spans,
        byte_per_s=np.where(outside, across, x.link_byte_per_s),
        link_byte_per_s=x.link_byte_per_s,
        network_byte_per_s=network / local,
        link_latency_s=x.link_latency_s,
        network_latency_s=x.network_latency_s,
        call_s=np.where(outside, call_s, 0.0),
        piece_s=np.where(outside, 0.0, LINK_PIECE_S),
    )
