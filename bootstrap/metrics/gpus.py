"""Utilisation and memory of this node's GPUs, from nvidia-smi.

Utilisation covers the last 1/6 to 1 s (https://docs.nvidia.com/deploy/nvidia-smi/index.html), so take many samples.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
# nvidia-smi answers within 1 s, or never where a GPU fell off the bus.
TIMEOUT_S = 10.0
MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU at one moment; None for a value that the GPU (a slice) does not report."""

    utilization_percent: float | None
    memory_used_gib: float | None


class GpuReader:
    """Runs ``query``, and never waits for more than ``timeout_s``."""

    def __init__(self, query: Sequence[str] = QUERY, *, timeout_s: float = TIMEOUT_S) -> None:
        self._query = list(query)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[str] | None = None
        self._problem = ""

    def read(self) -> list[GpuSample]:
        """Samples of the GPUs that answer; none where nvidia-smi fails, which is logged once a cause."""
        samples: list[GpuSample] = []
        try:
            samples = [parsed for line in self._answer().splitlines() if (parsed := parse(line)) is not None]
            problem = "" if samples else "nvidia-smi lists no GPU"
        except (OSError, RuntimeError) as error:
            problem = str(error)
        if problem != self._problem:
            logger.warning("%s", problem or "nvidia-smi answers again")
            self._problem = problem
        return samples

    def _answer(self) -> str:
        # A killed process may stay in the driver; a second one would only join it.
        if self._stuck is not None and self._stuck.poll() is None:
            raise RuntimeError(f"nvidia-smi has not answered for more than {self._timeout_s:g} s")
        self._stuck = None
        process = subprocess.Popen(self._query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            output, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            self._stuck = process
            raise RuntimeError(f"nvidia-smi has not answered for more than {self._timeout_s:g} s") from None
        # A lost GPU sets the status; the other GPUs' lines still count.
        if process.returncode and not output.strip():
            raise RuntimeError(f"nvidia-smi ended with {process.returncode}")
        return output


def parse(line: str) -> GpuSample | None:
    """Parse one line; None without a GPU ("Unable to determine the device handle ...")."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 2:
        return None
    utilization, memory_mib = (_number(field) for field in fields)
    if utilization is None and memory_mib is None:
        return None
    memory_gib = None if memory_mib is None else memory_mib / MIB_PER_GIB
    return GpuSample(utilization_percent=utilization, memory_used_gib=memory_gib)


def _number(text: str) -> float | None:
    """None for "[N/A]", "[GPU is lost]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None
