"""Utilisation and memory of this node's GPUs, from nvidia-smi.

nvidia-smi gives the share of time in which a kernel ran, over its last sample period of 1/6 to 1 s, so one look tells
little of a minute: https://docs.nvidia.com/deploy/nvidia-smi/index.html (utilization).
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
# It answers within a second; one that waits for a GPU that fell off the bus never does.
TIMEOUT_S = 10.0
MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One GPU at one moment.

    Attributes:
        utilization_percent: None where the GPU does not tell (a slice of one).
        memory_used_gib: None likewise.
    """

    utilization_percent: float | None
    memory_used_gib: float | None


class GpuReader:
    """Asks nvidia-smi, and never waits for one that hangs.

    Args:
        query: the command.
        timeout_s: of one answer.
    """

    def __init__(self, query: Sequence[str] = QUERY, *, timeout_s: float = TIMEOUT_S) -> None:
        self._query = list(query)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[str] | None = None
        self._problem = ""

    def read(self) -> list[GpuSample]:
        """The GPUs that answer; none where nvidia-smi fails, which is logged once a cause."""
        problem = ""
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
        # Killed, it may still sit in the driver and cannot be waited for; a second one would only join it there.
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
        # One GPU lost makes the status 15 or so; what the others say still counts.
        if process.returncode and not output.strip():
            raise RuntimeError(f"nvidia-smi ended with {process.returncode}")
        return output


def parse(line: str) -> GpuSample | None:
    """One line of the answer; None where it is about no GPU ("Unable to determine the device handle ...")."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 2:
        return None
    utilization, memory_mib = (_number(field) for field in fields)
    if utilization is None and memory_mib is None:
        return None
    return GpuSample(
        utilization_percent=utilization, memory_used_gib=None if memory_mib is None else memory_mib / MIB_PER_GIB
    )


def _number(text: str) -> float | None:
    """A value, or None for "[N/A]", "[GPU is lost]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None
