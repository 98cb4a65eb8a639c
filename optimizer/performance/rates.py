"""Rates and sizes of a node: arithmetic peaks, visible memory, links and network."""

from __future__ import annotations

from optimizer.contract.errors import DataMissingError
from optimizer.contract.hardware import Gpu
from optimizer.performance.types import Hardware

# fp32 over the 16-bit peak where the datasheet has none: below any in the table (B300 1/30).
LEAST_FP32_SHARE = 1 / 34

# The same ratio of RTX PRO 6000 (120 of 480), whose multiprocessors RTX PRO 4500 has.
WORKSTATION_FP32_SHARE = 1 / 4
# FP32 lanes of a multiprocessor; one multiply-add each a cycle (docs.nvidia.com/cuda/cuda-c-programming-guide,
# arithmetic instructions: 64 in compute capability 7.0, 7.5 and 8.0, 128 from 8.6 on).
LANES = 128
FEW_LANES = {"V100": 64, "V100 PCIe": 64, "T4": 64, "T4G": 64, "A100": 64, "A100 PCIe": 64}

# Share of one NVLink direction (half the datasheet's) in an all-reduce: A100 230.8 of 300 GB/s on 8 GPUs
# (https://github.com/NVIDIA/nccl/issues/527, p4d.24xlarge, 2022-07-25); H200 351 of 450 GB/s on 4 GPUs (1 GiB, NVLS
# off, torch 2.11, 2026-11-21).
NVLINK_EFFICIENCY = 0.79
# Two H200 reached 38, 170, 258, 297 and 323 GB/s at 1, 8, 64, 256 and 1024 MiB (tests/benchmarks/results,
# smoke_2xh200_202611.md), these give 42, 145, 259, 305 and 330; four H200 160 at 8 MiB, these give 169.
NVLINK_LATENCY_S = 15e-6
LINK_PIECE_S = 4e-6
# 28 GB/s on 8 RTX 5090 in gen 5 slots of 63 GB/s a direction (https://github.com/NVIDIA/nccl/issues/1639, 2025-03-14).
PCIE_EFFICIENCY = 0.44
# 8 bytes on 8 RTX 4090 took 42 us (https://github.com/NVIDIA/nccl/issues/1530).
PCIE_LATENCY_S = 42e-6
# 8 bytes took 51 us on 2 p6-b200.48xlarge (https://github.com/dstackai/dstack/pull/3961, 2026-06-12), 64 bytes 164 us
# on 4 p4d.24xlarge (nccl issue 527). TCP, without a figure, takes the same.
NETWORK_LATENCY_S = 50e-6
# EFA with GPUDirect: 29.6 of 50 GB/s on 4 p4d.24xlarge (https://github.com/NVIDIA/nccl/issues/527, 2022-07-25). EFA
# through host memory: 6 to 8 of 12.5 GB/s on 8 to 32 p3dn.24xlarge (https://github.com/NVIDIA/nccl/issues/235,
# 2019-07-16). TCP: 4.7 of 12.5 GB/s on p3dn.24xlarge (https://github.com/NVIDIA/nccl/issues/398, 2020-10-06).
EFA_EFFICIENCY = 0.59
EFA_HOST_EFFICIENCY = 0.56
TCP_EFFICIENCY = 0.38
# Through host memory from GPUs on PCIe: at most 3 of g6e.48xlarge's 50 GB/s, with EFA on all four cards
# (https://github.com/aws/aws-ofi-nccl/issues/547, 2024-08-28); the V100s of p3dn pass more, as NVLink gathers first.
PCIE_HOST_BYTE_PER_S = 3e9


def peak_flop_per_s(gpu: Gpu, precision: str) -> float:
    """Dense peak, FLOP/s."""
    peak = gpu.peak_tflop_per_s.get(precision)
    if not peak:
        has = ", ".join(name for name, value in gpu.peak_tflop_per_s.items() if value)
        raise DataMissingError(
            f"{gpu.name} has no {precision} peak in the GPU table",
            limit=f"it runs {has}",
            why=f"the vendor's datasheet gives no such rate ({gpu.source})",
            next_step="choose another --precision or GPU",
        )
    return float(peak) * 1e12


def cycle_per_s(gpu: Gpu) -> float:
    """Cycles of all multiprocessors together, 1/s."""
    fp32 = gpu.peak_tflop_per_s.get("fp32") or gpu.peak_tflop_per_s["bf16"] * WORKSTATION_FP32_SHARE
    return fp32 * 1e12 / (2 * FEW_LANES.get(gpu.die, LANES))


def link_rate(hardware: Hardware) -> tuple[float, float]:
    """Bus bandwidth (byte/s) and latency (s) of collectives inside a node."""
    if hardware.interconnect in ("nvlink", "nvswitch") and hardware.gpu.nvlink_gb_per_s > 0:
        return hardware.gpu.nvlink_gb_per_s / 2 * NVLINK_EFFICIENCY * 1e9, NVLINK_LATENCY_S
    return hardware.gpu.pcie_gb_per_s * PCIE_EFFICIENCY * 1e9, PCIE_LATENCY_S


def network_rate(hardware: Hardware) -> tuple[float, float]:
    """Bandwidth (byte/s) and latency (s) of collectives over one node's network."""
    byte_per_s = hardware.network_gbit_per_s * 1e9 / 8
    if hardware.gpudirect:
        return byte_per_s * EFA_EFFICIENCY, NETWORK_LATENCY_S
    byte_per_s *= EFA_HOST_EFFICIENCY if hardware.efa else TCP_EFFICIENCY
    if hardware.interconnect == "pcie":
        byte_per_s = min(byte_per_s, PCIE_HOST_BYTE_PER_S)
    return byte_per_s, NETWORK_LATENCY_S
