"""Entry point of gpufleet-metrics.service: samples the GPUs every five seconds, publishes once a minute."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bootstrap.metrics.gpus import GpuReader, GpuSample
from bootstrap.metrics.publish import Publisher, points
from bootstrap.metrics.throughput import Throughput
from bootstrap.service import REGION_VARIABLE, log_to_journal, make_client

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 5.0
WINDOW_S = 60.0
NAMESPACE_VARIABLE = "GPUFLEET_METRIC_NAMESPACE"
PROGRESS_VARIABLE = "GPUFLEET_PROGRESS_FILE"


def sample_window(
    reader: GpuReader, *, window_s: float = WINDOW_S, interval_s: float = SAMPLE_INTERVAL_S
) -> list[GpuSample]:
    """Sample all GPUs every ``interval_s`` for ``window_s`` seconds."""
    samples = []
    began = time.monotonic()
    for number in range(1, max(1, round(window_s / interval_s)) + 1):
        samples += reader.read()
        # By the clock: a slow answer must not stretch the window.
        time.sleep(max(0.0, began + number * interval_s - time.monotonic()))
    return samples


def main() -> int:
    """Publish until the service is stopped; 0 at once without a namespace."""
    log_to_journal()
    namespace = os.environ.get(NAMESPACE_VARIABLE, "")
    if not namespace:
        logger.info("no metrics: %s is empty", NAMESPACE_VARIABLE)
        return 0
    # Calls end before the next minute's.
    client = make_client("cloudwatch", os.environ[REGION_VARIABLE], connect_timeout_s=5, read_timeout_s=10, attempts=3)
    publisher = Publisher(client, namespace)
    reader = GpuReader()
    throughput = Throughput(Path(os.environ[PROGRESS_VARIABLE]))
    while True:
        publisher.send(points(sample_window(reader), throughput.tokens_per_second(), datetime.now(UTC)))


if __name__ == "__main__":
    sys.exit(main())
