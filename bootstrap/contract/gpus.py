"""A node's GPUs in one minute: a JSON line of the log stream ``gpus/<instance id>``, written by bootstrap/metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import from_json, parse_json, to_json

STREAMS = "gpus/"
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html, without the software's power cap, under
# which large products run on every healthy GPU (tests/benchmarks/results/h200_ops_202611.md).
THROTTLING = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


def slowed_by(active: int) -> list[str]:
    """Name what slows a GPU down, from the bits of ``clocks_event_reasons.active``."""
    return [name for bit, name in THROTTLING.items() if active & bit]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMinute:
    """One GPU; None for a value that it does not report."""

    busy_percent: float | None = None  # mean share of time in which a kernel ran
    memory_used_gib: float | None = None  # highest
    memory_total_gib: float | None = None
    power_w: float | None = None  # mean
    temperature_celsius: float | None = None  # highest
    sm_clock_mhz: float | None = None  # mean
    throttled: dict[str, float] = field(default_factory=dict)  # share of the samples, by a word of THROTTLING
    ecc_corrected: int | None = None  # errors since the driver was loaded
    ecc_uncorrected: int | None = None
    pcie_rx_mb_per_s: float | None = None  # a short sample at the end of the minute
    pcie_tx_mb_per_s: float | None = None
    nvlink_rx_mb_per_s: float | None = None  # mean, all links
    nvlink_tx_mb_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMinute:
    """A node's GPUs by index, its errors and its EFA traffic."""

    schema_version: Literal[1] = 1
    at: datetime  # end of the minute
    gpus: dict[str, GpuMinute]
    xids: dict[str, int] = field(default_factory=dict)  # the kernel's messages by Xid number, since boot
    efa_rx_mb_per_s: float | None = None  # mean, all cards
    efa_tx_mb_per_s: float | None = None

    def to_text(self) -> str:
        """Format the line."""
        return json.dumps(to_json(self), separators=(",", ":"))


def read_minute(text: str, place: str) -> NodeMinute:
    """Parse a line, also a newer version's; else a FormatError."""
    return from_json(NodeMinute, parse_json(text, place), place, lenient=True)
