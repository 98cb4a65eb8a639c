"""Metrics of a minute's samples, and their publication in CloudWatch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bootstrap.metrics.gpus import GpuSample
from bootstrap.service import Failures

logger = logging.getLogger(__name__)

# An hour of three metrics; CloudWatch takes points up to two weeks old and 1,000 in a request:
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
KEPT_POINTS = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One value of one metric. CloudWatch has no unit GiB, so the metric's name has it."""

    name: str
    value: float
    unit: str
    at: datetime


def points(samples: Sequence[GpuSample], tokens_per_second: float | None, at: datetime) -> list[Point]:
    """Metrics of one window; without a measurement left out, never zero."""
    utilization = [sample.utilization_percent for sample in samples if sample.utilization_percent is not None]
    memory_gib = [sample.memory_used_gib for sample in samples if sample.memory_used_gib is not None]
    values = (
        ("GpuUtilizationPercent", sum(utilization) / len(utilization) if utilization else None, "Percent"),
        ("GpuMemoryUsedGiB", max(memory_gib, default=None), "None"),
        ("TokensPerSecond", tokens_per_second, "Count/Second"),
    )
    return [Point(name=name, value=value, unit=unit, at=at) for name, value, unit in values if value is not None]


class Publisher:
    """Sends points to CloudWatch; keeps unsent points for the next time."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._waiting: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._failures = Failures(
            logger,
            failing="metrics are not published, the last hour's are kept",
            again="metrics are published again",
        )

    def send(self, new: Sequence[Point]) -> None:
        """Send waiting and new points; failures are logged once a cause."""
        self._waiting.extend(new)
        if not self._waiting:
            return
        with self._failures.caught():
            self._client.put_metric_data(
                Namespace=self._namespace,
                MetricData=[
                    {"MetricName": point.name, "Value": point.value, "Unit": point.unit, "Timestamp": point.at}
                    for point in self._waiting
                ],
            )
            self._waiting.clear()
