"""Traffic of this node's GPUs and EFA cards, and the kernel's Xid messages: read once a minute."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.metrics.program import Program

# Counters of NVLink's data, and the GPUs' own measure of PCIe: https://docs.nvidia.com/deploy/nvidia-smi/index.html
NVLINK = ("nvidia-smi", "nvlink", "--getthroughput", "d")
PCIE = ("nvidia-smi", "dmon", "--select", "t", "--count", "1")
KERNEL_LOG = ("dmesg",)
# Counters of the EFA driver: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-working-monitor.html
EFA_CARDS = Path("/sys/class/infiniband")
EFA_COUNTERS = "*/ports/*/hw_counters/{}_bytes"
DIRECTIONS = ("rx", "tx")
_LINK = re.compile(r"Link \d+: Data (Rx|Tx): (\d+) KiB")
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
BYTES_PER_MB = 1e6

Rates = dict[str, float]  # MB/s by direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Rates of one minute, by GPU where the GPU reports them; errors since boot."""

    pcie: dict[int, Rates] = field(default_factory=dict)
    nvlink: dict[int, Rates] = field(default_factory=dict)
    efa: Rates = field(default_factory=dict)
    xids: dict[str, int] = field(default_factory=dict)


class TrafficReader:
    """Reads counters, and their rates since the last look."""

    def __init__(
        self,
        *,
        nvlink: Program | None = None,
        pcie: Program | None = None,
        kernel_log: Program | None = None,
        efa_cards: Path = EFA_CARDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvlink, self._pcie = nvlink or Program(NVLINK), pcie or Program(PCIE)
        self._kernel_log, self._efa_cards, self._clock = kernel_log or Program(KERNEL_LOG), efa_cards, clock
        self._last: dict[tuple[str, str], tuple[float, float]] = {}

    def read(self) -> Traffic:
        """Look once; a part that cannot be read is empty."""
        nvlink: dict[int, Rates] = defaultdict(dict)
        for (gpu, direction), count in parse_nvlink(_output(self._nvlink)).items():
            if (rate := self._rate(f"nvlink {gpu}", direction, count)) is not None:
                nvlink[gpu][direction] = rate
        efa = {}
        for direction, count in _efa_bytes(self._efa_cards).items():
            if (rate := self._rate("efa", direction, count)) is not None:
                efa[direction] = rate
        pcie, xids = parse_pcie(_output(self._pcie)), parse_xids(_output(self._kernel_log))
        return Traffic(pcie=pcie, nvlink=dict(nvlink), efa=efa, xids=xids)

    def _rate(self, what: str, direction: str, count: float) -> float | None:
        """MB/s since the last look; None without one, or after a driver started anew from 0."""
        now = self._clock()
        at, before = self._last.get((what, direction), (now, count))
        self._last[what, direction] = now, count
        return (count - before) / (now - at) / BYTES_PER_MB if now > at and count >= before else None


def parse_nvlink(output: str) -> dict[tuple[int, str], float]:
    """Bytes by GPU and direction, of all links; empty for GPUs without NVLink, which print nothing."""
    found: dict[tuple[int, str], float] = defaultdict(float)
    gpu = None
    for line in output.splitlines():
        if (start := re.match(r"GPU (\d+):", line)) is not None:
            gpu = int(start[1])
        elif gpu is not None and (link := _LINK.search(line)) is not None:
            found[gpu, link[1].lower()] += int(link[2]) * 1024.0
    return dict(found)


def parse_pcie(output: str) -> dict[int, Rates]:
    """MB/s by GPU: lines "GPU RX TX" below the headings; "-" where a GPU does not report."""
    found = {}
    for line in output.splitlines():
        words = line.split()
        with suppress(ValueError):
            if len(words) == 1 + len(DIRECTIONS):
                found[int(words[0])] = {name: float(word) for name, word in zip(DIRECTIONS, words[1:], strict=True)}
    return found


def parse_xids(output: str) -> dict[str, int]:
    """Messages of the kernel's log by Xid number."""
    return dict(Counter(_XID.findall(output)))


def _efa_bytes(cards: Path) -> Rates:
    found: Rates = {}
    for direction in DIRECTIONS:
        for counter in cards.glob(EFA_COUNTERS.format(direction)):
            with suppress(OSError, ValueError):
                found[direction] = found.get(direction, 0.0) + int(counter.read_text())
    return found


def _output(program: Program) -> str:
    with suppress(OSError, RuntimeError):  # absent, or hanging as nvidia-smi does, which gpus.py logs
        return program.output()
    return ""
