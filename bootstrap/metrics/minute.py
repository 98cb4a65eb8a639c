"""A minute's samples as one line of the node's log stream (contract/gpus.py)."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import datetime
from statistics import fmean

from bootstrap.contract.gpus import GpuMinute, NodeMinute
from bootstrap.logs.journal import Line
from bootstrap.logs.upload import LogStream
from bootstrap.metrics.gpus import GpuSample
from bootstrap.metrics.traffic import Traffic
from bootstrap.service import Failures

logger = logging.getLogger(__name__)

# An hour.
KEPT_MINUTES = 60


def node_minute(samples: Sequence[GpuSample], traffic: Traffic, at: datetime) -> NodeMinute:
    """Fold a minute's samples of all GPUs."""
    by_gpu: dict[int, list[GpuSample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.index, []).append(sample)
    return NodeMinute(
        at=at,
        gpus={str(gpu): _fold(own, traffic, gpu) for gpu, own in sorted(by_gpu.items())},
        xids=traffic.xids,
        efa_rx_mb_per_s=_short(traffic.efa.get("rx")),
        efa_tx_mb_per_s=_short(traffic.efa.get("tx")),
    )


def _fold(samples: Sequence[GpuSample], traffic: Traffic, gpu: int) -> GpuMinute:
    def values(name: str) -> list[float]:
        return [value for sample in samples if (value := getattr(sample, name)) is not None]

    def mean(name: str) -> float | None:
        return _short(fmean(found)) if (found := values(name)) else None

    def highest(name: str) -> float | None:
        return _short(max(values(name), default=None))

    def count(name: str) -> int | None:
        return int(found[-1]) if (found := values(name)) else None

    reasons = Counter(reason for sample in samples for reason in sample.slowed_by or ())
    pcie, nvlink = traffic.pcie.get(gpu, {}), traffic.nvlink.get(gpu, {})
    return GpuMinute(
        busy_percent=mean("utilization_percent"),
        memory_used_gib=highest("memory_used_gib"),
        memory_total_gib=highest("memory_total_gib"),
        power_w=mean("power_w"),
        temperature_celsius=highest("temperature_celsius"),
        sm_clock_mhz=mean("sm_clock_mhz"),
        throttled={reason: round(times / len(samples), 2) for reason, times in reasons.items()},
        ecc_corrected=count("ecc_corrected"),
        ecc_uncorrected=count("ecc_uncorrected"),
        pcie_rx_mb_per_s=_short(pcie.get("rx")),
        pcie_tx_mb_per_s=_short(pcie.get("tx")),
        nvlink_rx_mb_per_s=_short(nvlink.get("rx")),
        nvlink_tx_mb_per_s=_short(nvlink.get("tx")),
    )


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class MinuteLog:
    """Sends minutes to the node's stream; keeps unsent ones for the next time.

    Plain log lines, because CloudWatch bills each value of each GPU as a metric of its own, also of the embedded metric
    format and of metric filters (docs/bootstrap.md#metrics).
    """

    def __init__(self, stream: Callable[[], LogStream]) -> None:
        self._stream = stream
        self._waiting: deque[NodeMinute] = deque(maxlen=KEPT_MINUTES)
        self._failures = Failures(
            logger,
            failing="the GPUs' state is not sent, the last hour's is kept",
            again="the GPUs' state is sent again",
        )

    def send(self, minute: NodeMinute) -> None:
        """Send waiting minutes and a new one; failures are logged once a cause."""
        self._waiting.append(minute)
        with self._failures.caught():
            lines = [Line(text=one.to_text(), at_ms=int(one.at.timestamp() * 1000), cursor="") for one in self._waiting]
            self._stream().put(lines)
            self._waiting.clear()
