"""Collectives: bytes, bandwidth and time, over NVLink or PCIe inside a node and over the network between nodes.

A ring over n ranks sends (n - 1) / n of the buffer in a gather or a reduce-scatter, twice that in an all-reduce; time
is those bytes over the bus bandwidth (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
Ranks are placed tensor first, then context, data, pipeline, as Megatron and torch's device mesh do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.errors import DataMissingError
from optimizer.performance.inputs import Inputs, Number
from optimizer.performance.memory import stage_parameters, tokens_of_rank
from optimizer.performance.types import FULL, ZERO2, ZERO3, Hardware

# All-reduce bus bandwidth over one direction of a GPU's NVLink (half of the datasheet's figure, which counts both):
# A100 230.8 of 300 GB/s on 8 GPUs (https://github.com/NVIDIA/nccl/issues/527, p4d.24xlarge, 2022-07-25); H200 351 of
# 450 GB/s on 4 GPUs and 317 on 2 (1 GiB, NVLS off, torch 2.11, measured 2026-11-21).
NVLINK_EFFICIENCY = 0.77
# 8 MiB on H200 took 65 us on 2 GPUs (129 GB/s) and 79 us on 4 (160 GB/s), 39 and 43 us more than at full bandwidth.
NVLINK_LATENCY_S = 40e-6
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
        tensor: all-reduces of tensor parallelism, all layers of the model, one micro-batch.
        context: key-value exchange of context parallelism, all layers, one micro-batch.
        pipeline: sends between two neighbouring stages, forward and backward, one micro-batch.
    """

    data_per_micro_batch: Number
    data_per_step: Number
    tensor: Number
    context: Number
    pipeline: Number


def communication(x: Inputs) -> Communication:
    """Seconds of one rank's communication, none of it hidden yet."""
    local = np.maximum(
        1.0, np.minimum(x.data * x.tensor * x.pipeline * x.context / np.maximum(x.nodes, 1.0), x.gpus_per_node)
    )
    network = x.network_byte_per_s * x.coefficients.network_efficiency
    tokens = tokens_of_rank(x)

    # Tensor: two all-reduces forward, two backward, two when the forward pass is recomputed.
    bandwidth, latency = _path(x, network, local, x.tensor, inner=1.0)
    tensor_calls = x.layers * (4.0 + np.where(x.checkpointing == FULL, 2.0, 0.0))
    ring = 2.0 * (x.tensor - 1.0) / x.tensor
    call = ring * tokens * x.hidden * x.element_bytes / bandwidth + latency
    tensor = np.where(x.tensor > 1, tensor_calls * call, 0.0)

    # Context: every rank sees all keys and values once forward, and they and their gradients backward.
    bandwidth, latency = _path(x, network, local, x.context, inner=x.tensor)
    exchanged = (x.context - 1.0) * tokens * 2.0 * x.kv / x.tensor * x.element_bytes
    context = np.where(x.context > 1, x.layers * 3.0 * (exchanged / bandwidth + (x.context - 1.0) * latency), 0.0)

    # Data: gradients and, from ZeRO-1 on, parameters.
    bandwidth, latency = _path(x, network, local, x.data * x.context, inner=x.tensor)
    parameters = stage_parameters(x)
    ranks = x.data * x.context
    share = (ranks - 1.0) / ranks
    reduced = parameters * x.reduce_bytes
    gathered = parameters * np.minimum(x.element_bytes, x.weight_bytes)
    sharded_calls = x.layers / x.pipeline + 1.0
    reduce_scatter = share * reduced / bandwidth
    gather = share * gathered / bandwidth
    bucket_calls = np.ceil(reduced / BUCKET_BYTES)
    # ZeRO-3 gathers forward and backward and reduces in every micro-batch; ZeRO-2 reduces in every micro-batch.
    per_micro_batch = np.where(
        x.sharding >= ZERO3,
        reduce_scatter + 2.0 * gather + 3.0 * sharded_calls * latency,
        np.where(x.sharding >= ZERO2, reduce_scatter + sharded_calls * latency, 0.0),
    )
    # ZeRO-2 gathers the updated parameters once; DDP and ZeRO-1 move as much as one all-reduce of the gradients.
    per_step = np.where(
        x.sharding >= ZERO3,
        0.0,
        np.where(x.sharding >= ZERO2, gather + sharded_calls * latency, 2.0 * reduce_scatter + bucket_calls * latency),
    )
    several = ranks > 1

    # Pipeline: neighbouring stages are on one node only where a stage is smaller than a node.
    stage_ranks = x.data * x.tensor * x.context
    p2p = np.where(stage_ranks >= local, network / local, x.link_byte_per_s)
    # Tensor ranks send a slice each and gather it over NVLink (arXiv:2104.04473, 4.1).
    sent = 2.0 * tokens * x.hidden * x.element_bytes / x.tensor
    pipeline = np.where(x.pipeline > 1, x.virtual_stages * (sent / p2p + 2.0 * x.link_latency_s), 0.0)
    return Communication(
        data_per_micro_batch=np.where(several, per_micro_batch, 0.0),
        data_per_step=np.where(several, per_step, 0.0),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
    )


def _path(x: Inputs, network: Number, local: Number, ranks: Number, inner: Number) -> tuple[Number, Number]:
    """Bus bandwidth and latency of a group of ``ranks`` whose neighbours are ``inner`` places apart.

    A group within a node has the node's links. One that spans nodes has the network, which the groups side by side on
    a node share: with ``members`` of the group on each node, local / members groups do.
    """
    members = np.maximum(1.0, np.minimum(ranks, local / inner))
    spans = np.ceil(ranks / members)
    across = np.minimum(x.link_byte_per_s, network * members / local)
    bandwidth = np.where(spans > 1, across, x.link_byte_per_s)
    latency = np.where(spans > 1, x.network_latency_s * (1.0 + np.log2(spans)), x.link_latency_s)
    return bandwidth, latency
