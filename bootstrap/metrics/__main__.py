"""Entry point of gpufleet-metrics.service: samples the GPUs every five seconds, sends and serves once a minute."""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bootstrap.contract.gpus import STREAMS
from bootstrap.logs.upload import LogStream
from bootstrap.metrics.gpus import GpuReader, GpuSample
from bootstrap.metrics.minute import MinuteLog, node_minute
from bootstrap.metrics.prometheus import Exporter
from bootstrap.metrics.publish import Publisher, points
from bootstrap.metrics.throughput import Throughput
from bootstrap.metrics.traffic import TrafficReader
from bootstrap.service import REGION_VARIABLE, log_to_journal, make_client
from bootstrap.training.watcher import own_imds

logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 5.0
WINDOW_S = 60.0
NAMESPACE_VARIABLE = "GPUFLEET_METRIC_NAMESPACE"
GROUP_VARIABLE = "GPUFLEET_LOG_GROUP"
RUN_DIR_VARIABLE = "GPUFLEET_RUN_DIR"
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


def instance_id() -> str:
    """Id of this node's instance; a pod, which has no metadata service, reads it from the host's (kubernetes/serve.sh).

    Raises:
        ImdsError, OSError: it is not known, or not yet.
    """
    imds = own_imds()
    told = (
        imds.get("instance-id")
        if imds is not None
        else (Path(os.environ[RUN_DIR_VARIABLE]) / "instance-id").read_text(encoding="utf-8").strip()
    )
    if not told:
        raise OSError("this instance's id is not known")
    return told


def minute_log(client: Any, group: str) -> MinuteLog | None:
    """Log of this node's minutes; None without a group."""
    return MinuteLog(lambda: LogStream(client, group, f"{STREAMS}{instance_id()}")) if group else None


def main() -> int:
    """Publish until the service is stopped; 0 at once without a namespace."""
    log_to_journal()
    namespace = os.environ.get(NAMESPACE_VARIABLE, "")
    if not namespace:
        logger.info("no metrics: %s is empty", NAMESPACE_VARIABLE)
        return 0
    region, group = os.environ[REGION_VARIABLE], os.environ.get(GROUP_VARIABLE, "")
    # Calls end before the next minute's.
    cloudwatch, logs = (
        make_client(name, region, connect_timeout_s=5, read_timeout_s=10, attempts=3) for name in ("cloudwatch", "logs")
    )
    publisher = Publisher(cloudwatch, namespace)
    minutes = minute_log(logs, group)
    reader, traffic, exporter = GpuReader(), TrafficReader(), Exporter()
    throughput = Throughput(Path(os.environ[PROGRESS_VARIABLE]))
    while True:
        samples = sample_window(reader)
        now, tokens_per_second = datetime.now(UTC), throughput.tokens_per_second()
        minute = node_minute(samples, traffic.read(), now)
        exporter.show(minute, tokens_per_second)
        publisher.send(points(samples, tokens_per_second, now))
        if minutes is not None:
            minutes.send(minute)


if __name__ == "__main__":
    sys.exit(main())
