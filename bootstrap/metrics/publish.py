"""What is published, and how: a minute of samples as metrics of the stack's own CloudWatch namespace."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bootstrap.metrics.gpus import GpuSample

logger = logging.getLogger(__name__)

# An hour of three metrics: CloudWatch takes points up to two weeks old and 1,000 in a request,
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html
KEPT_POINTS = 180


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One value of one metric. GiB has no unit in CloudWatch, so its name says it."""

    name: str
    value: float
    unit: str
    at: datetime


def points(samples: Sequence[GpuSample], tokens_per_second: float | None, at: datetime) -> list[Point]:
    """The metrics of one window; what nobody measured is left out, never zero."""
    utilization = [sample.utilization_percent for sample in samples if sample.utilization_percent is not None]
    memory_gib = [sample.memory_used_gib for sample in samples if sample.memory_used_gib is not None]
    found = []
    if utilization:
        mean = sum(utilization) / len(utilization)
        found.append(Point(name="GpuUtilizationPercent", value=mean, unit="Percent", at=at))
    if memory_gib:
        found.append(Point(name="GpuMemoryUsedGiB", value=max(memory_gib), unit="None", at=at))
    if tokens_per_second is not None:
        found.append(Point(name="TokensPerSecond", value=tokens_per_second, unit="Count/Second", at=at))
    return found


class Publisher:
    """Sends points, and keeps those that could not be sent for the next time.

    Args:
        client: boto3's CloudWatch client.
        namespace: the stack's.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._waiting: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._problem = ""

    def send(self, new: Sequence[Point]) -> None:
        """Send what is waiting and what is new; whatever goes wrong is logged, once a cause."""
        self._waiting.extend(new)
        if not self._waiting:
            return
        try:
            self._client.put_metric_data(
                Namespace=self._namespace,
                MetricData=[
                    {"MetricName": point.name, "Value": point.value, "Unit": point.unit, "Timestamp": point.at}
                    for point in self._waiting
                ],
            )
        except Exception as error:  # noqa: BLE001 - no network, throttled, no permission: none of it ends the service
            if (problem := f"{type(error).__name__}: {error}") != self._problem:
                logger.warning("metrics are not published, the last hour's are kept: %s", problem)
                self._problem = problem
            return
        if self._problem:
            logger.info("metrics are published again")
        self._waiting.clear()
        self._problem = ""
