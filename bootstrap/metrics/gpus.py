"""This node's GPUs, from nvidia-smi, which comes with the driver; NVML's Python package and DCGM do not.

Utilisation covers the last 1/6 to 1 s (https://docs.nvidia.com/deploy/nvidia-smi/index.html), so take many samples.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.contract.gpus import slowed_by
from bootstrap.metrics.program import TIMEOUT_S, Program

logger = logging.getLogger(__name__)

FIELDS = (
    "index", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu", "clocks.sm",
    "clocks_event_reasons.active", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU at one moment; None for a value that the GPU (a slice) does not report."""

    index: int
    utilization_percent: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    slowed_by: tuple[str, ...] | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None


class GpuReader:
    """Asks ``query``, and never waits for more than ``timeout_s``."""

    def __init__(self, query: Sequence[str] = QUERY, *, timeout_s: float = TIMEOUT_S) -> None:
        self._program = Program(query, timeout_s=timeout_s)
        self._problem = ""

    def read(self) -> list[GpuSample]:
        """Samples of the GPUs that answer; none where nvidia-smi fails, which is logged once a cause."""
        samples: list[GpuSample] = []
        try:
            output = self._program.output()
            samples = [parsed for line in output.splitlines() if (parsed := parse(line)) is not None]
            problem = "" if samples else "nvidia-smi lists no GPU"
        except (OSError, RuntimeError) as error:
            problem = str(error)
        if problem != self._problem:
            logger.warning("%s", problem or "nvidia-smi answers again")
            self._problem = problem
        return samples


def parse(line: str) -> GpuSample | None:
    """Parse one line; None without a GPU ("Unable to determine the device handle ...") and of a lost one."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(FIELDS) or not fields[0].isdecimal():
        return None
    busy, used_mib, total_mib, power, temperature, clock = (_number(field) for field in fields[1:7])
    if busy is None and used_mib is None:
        return None
    return GpuSample(
        index=int(fields[0]),
        utilization_percent=busy,
        memory_used_gib=None if used_mib is None else used_mib / MIB_PER_GIB,
        memory_total_gib=None if total_mib is None else total_mib / MIB_PER_GIB,
        power_w=power,
        temperature_celsius=temperature,
        sm_clock_mhz=clock,
        slowed_by=_reasons(fields[7]),
        ecc_corrected=_number(fields[8]),
        ecc_uncorrected=_number(fields[9]),
    )


def _number(text: str) -> float | None:
    """None for "[N/A]", "[GPU is lost]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def _reasons(text: str) -> tuple[str, ...] | None:
    try:
        return tuple(slowed_by(int(text, 16)))
    except ValueError:
        return None
