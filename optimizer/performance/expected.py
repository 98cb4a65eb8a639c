"""Rates that the smoke tests of a plan's nodes compare with, from the facts that its estimate used."""

from __future__ import annotations

from bootstrap.contract.node_plan import Band, Expected
from optimizer.contract.hardware import Precision
from optimizer.performance import kernels
from optimizer.performance.calibration import Calibration
from optimizer.performance.collectives import ring_slowdown
from optimizer.performance.confidence import is_measured
from optimizer.performance.rates import link_rate, network_rate
from optimizer.performance.types import Hardware, Recipe

# Shares of the expected rate below which a node warns and fails. NVLink through a switch was measured within 3% of
# rates.py (231 of 237 GB/s on A100, 323 of 330 and 351 of 355 on H200); NCCL that falls back to PCIe has 6 to 8% of it.
SWITCH = (0.9, 0.5)
# EFA with GPUDirect: three of four cards are 0.75 of the network and two 0.5. TCP, which has the first card only, has
# at most a fifth (rates.py: 0.38 of one of p4d's four cards against 0.59 of all).
EFA = (0.75, 0.5)
# Rates from machines of another kind (PCIe, TCP, EFA through host memory, unmeasured GPUs) fail no node.
ROUGH = (0.5, None)
# H200's sustained products were measured within 3%; the hardware's slowdown halves a GPU's clock at least:
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html (HwSlowdown)
MATMUL = (0.86, 0.5)


def expected_rates(hardware: Hardware, nodes: int, calibration: Calibration) -> Expected:
    """Compute what a gang's collectives and products should reach."""
    link_gb_per_s, network_gb_per_s = link_rate(hardware)[0] / 1e9, network_rate(hardware)[0] / 1e9
    network_gb_per_s /= float(ring_slowdown(nodes))
    link, network = None, None
    if hardware.gpus_per_node > 1:
        network_gb_per_s = min(network_gb_per_s, link_gb_per_s)
        link = _band(link_gb_per_s, *(SWITCH if hardware.interconnect == "nvswitch" else ROUGH))
    if nodes > 1:
        network = _band(network_gb_per_s, *(EFA if hardware.gpudirect else ROUGH))
    return Expected(link_gb_per_s=link, network_gb_per_s=network, matmul_tflop_per_s=_matmul(hardware, calibration))


def _matmul(hardware: Hardware, calibration: Calibration) -> Band | None:
    gpu = hardware.gpu
    # The smoke test's choice too: bf16 where the GPU has it.
    precision: Precision = "bf16" if gpu.peak_tflop_per_s.get("bf16") else "fp16"
    peak_tflop_per_s = gpu.peak_tflop_per_s.get(precision)
    if not peak_tflop_per_s:
        return None
    efficiency = float(calibration.coefficients(gpu, Recipe(seq_len=1, precision=precision)).matmul_efficiency)
    value = peak_tflop_per_s * efficiency / (1.0 + kernels.throttling(gpu.architecture, precision))
    return _band(value, *(MATMUL if is_measured(calibration, gpu, precision) else ROUGH))


def _band(value: float, warn: float, fail: float | None) -> Band:
    return Band(
        value=round(value, 3),
        warn_below=round(value * warn, 3),
        fail_below=None if fail is None else round(value * fail, 3),
    )
