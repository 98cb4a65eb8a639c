"""Log stream ``gpus/<instance id>`` of a node's GPUs, printed by steps/print-gpus.sh."""

from __future__ import annotations

STREAMS = "gpus/"
# Lines "gpu, ..." have these fields of nvidia-smi, in this order: https://docs.nvidia.com/deploy/nvidia-smi/index.html
FIELDS = (
    "index", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu", "clocks.sm",
    "clocks_event_reasons.active", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html, without the software's power cap, under
# which large products run on every healthy GPU (tests/benchmarks/results/h200_ops_202611.md).
THROTTLING = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


def slowed_by(active: int) -> list[str]:
    """Name what slows a GPU down, from the bits of ``clocks_event_reasons.active``."""
    return [name for bit, name in THROTTLING.items() if active & bit]
