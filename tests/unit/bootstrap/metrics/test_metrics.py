"""The publisher against moto's CloudWatch, a fake nvidia-smi and everything that may go wrong between them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from bootstrap.metrics import __main__ as service
from bootstrap.metrics.gpus import GpuReader, GpuSample, parse
from bootstrap.metrics.publish import KEPT_POINTS, Point, Publisher, points
from bootstrap.metrics.throughput import Throughput

NOW = datetime.now(UTC).replace(microsecond=0)
NAMESPACE = "gpufleet/dev"


@pytest.fixture
def cloudwatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        yield boto3.client("cloudwatch", region_name="us-east-1")


def published(client: Any, name: str) -> list[float]:
    """Every value of a metric without dimensions, oldest first."""
    answer = client.get_metric_statistics(
        Namespace=NAMESPACE, MetricName=name, Period=60, Statistics=["Average"],
        StartTime=NOW - timedelta(hours=2), EndTime=NOW + timedelta(hours=1),
    )  # fmt: skip
    return [point["Average"] for point in sorted(answer["Datapoints"], key=lambda point: point["Timestamp"])]


def fake(folder: Path, body: str) -> list[str]:
    """A program in the place of nvidia-smi."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def test_means_of_the_minute_and_the_fullest_gpu(cloudwatch: Any) -> None:
    samples = [
        GpuSample(utilization_percent=percent, memory_used_gib=gib)
        for percent, gib in ((100.0, 70.0), (50.0, 72.5), (90.0, 71.0), (40.0, 10.0))
    ]
    Publisher(cloudwatch, NAMESPACE).send(points(samples, 12_345.5, NOW))
    assert published(cloudwatch, "GpuUtilizationPercent") == [70.0]
    assert published(cloudwatch, "GpuMemoryUsedGiB") == [72.5]
    assert published(cloudwatch, "TokensPerSecond") == [12_345.5]
    metrics = cloudwatch.list_metrics()["Metrics"]
    # IAM allows this namespace alone.
    assert {(metric["Namespace"], len(metric["Dimensions"])) for metric in metrics} == {(NAMESPACE, 0)}


def test_what_nobody_measured_is_left_out() -> None:
    assert points([], None, NOW) == []
    measured = points([GpuSample(utilization_percent=None, memory_used_gib=3.0)], None, NOW)
    assert [point.name for point in measured] == ["GpuMemoryUsedGiB"]


class FailingClient:
    """A CloudWatch client that raises the given errors first."""

    def __init__(self, client: Any, *errors: Exception) -> None:
        self._client, self._errors = client, list(errors)

    def put_metric_data(self, **arguments: Any) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        return self._client.put_metric_data(**arguments)


THROTTLED = ClientError({"Error": {"Code": "Throttling", "Message": "Rate exceeded"}}, "PutMetricData")
NO_NETWORK = EndpointConnectionError(endpoint_url="https://monitoring.us-east-1.amazonaws.com/")


def test_what_could_not_be_sent_is_sent_later_with_its_own_time(
    cloudwatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(FailingClient(cloudwatch, THROTTLED, NO_NETWORK, NO_NETWORK), NAMESPACE)
    with caplog.at_level(logging.INFO):
        for minute in range(4):
            at = NOW - timedelta(minutes=10 - minute)
            publisher.send([Point(name="GpuUtilizationPercent", value=float(minute), unit="Percent", at=at)])
    assert published(cloudwatch, "GpuUtilizationPercent") == [0.0, 1.0, 2.0, 3.0]
    told = [record.message for record in caplog.records if "publish" in record.message]
    assert len(told) == 3, "the same cause is told once"
    assert "Throttling" in told[0] and "Could not connect" in told[1] and told[2] == "metrics are published again"


def test_what_waits_is_bounded(cloudwatch: Any) -> None:
    publisher = Publisher(FailingClient(cloudwatch, *[NO_NETWORK] * 300), NAMESPACE)
    for number in range(301):
        at = NOW - timedelta(seconds=301 - number)
        publisher.send([Point(name="TokensPerSecond", value=1.0, unit="Count/Second", at=at)])
    answer = cloudwatch.get_metric_statistics(
        Namespace=NAMESPACE, MetricName="TokensPerSecond", Period=86400, Statistics=["SampleCount"],
        StartTime=NOW - timedelta(days=1), EndTime=NOW + timedelta(days=1),
    )  # fmt: skip
    assert sum(point["SampleCount"] for point in answer["Datapoints"]) == KEPT_POINTS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("87, 40536", GpuSample(utilization_percent=87.0, memory_used_gib=40536 / 1024)),
        ("[N/A], 1024", GpuSample(utilization_percent=None, memory_used_gib=1.0)),
        ("[GPU is lost], [GPU is lost]", None),
        ("[N/A], [N/A]", None),
        ("Unable to determine the device handle for GPU0000:B7:00.0: Unknown Error", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, expected: GpuSample | None) -> None:
    assert parse(line) == expected


def test_a_gpu_that_fell_off_hides_no_other(tmp_path: Path) -> None:
    lines = ["echo '91, 30720'", "echo 'Unable to determine the device handle for GPU0000:B7:00.0'", "exit 15"]
    samples = GpuReader(fake(tmp_path, "\n".join(lines))).read()
    assert samples == [GpuSample(utilization_percent=91.0, memory_used_gib=30.0)]


@pytest.mark.parametrize("body", ["exit 9", "echo 'No devices were found'", ""])
def test_no_answer_is_no_sample_and_told_once(body: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = GpuReader(fake(tmp_path, body))
    with caplog.at_level(logging.INFO):
        assert reader.read() == reader.read() == []
        assert len(caplog.records) == 1
        fake(tmp_path, "echo '1, 1024'")
        assert len(reader.read()) == 1
    assert caplog.records[-1].message == "nvidia-smi answers again"


def test_no_nvidia_smi_is_no_sample(tmp_path: Path) -> None:
    assert GpuReader([str(tmp_path / "nvidia-smi")]).read() == []


def test_nvidia_smi_that_hangs_is_asked_no_second_time_while_it_does(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    reader = GpuReader(fake(tmp_path, f"echo >>{calls}\nexec sleep 600"), timeout_s=0.3)
    assert reader.read() == []
    stuck = reader._stuck
    assert stuck is not None
    # Killed and still there, like a process in the driver.
    reader._stuck = subprocess.Popen(["sleep", "600"], text=True, stdout=subprocess.PIPE)
    assert reader.read() == []
    assert calls.read_text().count("\n") == 1
    reader._stuck.kill()
    reader._stuck.communicate()
    stuck.communicate()
    fake(tmp_path, "echo '1, 1024'")
    assert len(reader.read()) == 1


def test_a_window_is_sampled_all_along(tmp_path: Path) -> None:
    reader = GpuReader(fake(tmp_path, f"echo >>{tmp_path}/calls; wc -l <{tmp_path}/calls | sed 's/$/, 1024/'"))
    samples = service.sample_window(reader, window_s=0.5, interval_s=0.1)
    assert [sample.utilization_percent for sample in samples] == [1.0, 2.0, 3.0, 4.0, 5.0]


def mark(path: Path, at: float, tokens: float | None) -> None:
    path.write_text(json.dumps({"schema_version": 1, "at": at, "step": 1, "samples": 1, "tokens": tokens}))


def test_tokens_per_second_between_two_looks(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    throughput = Throughput(path)
    assert throughput.tokens_per_second() is None, "nothing trains"
    mark(path, 1000.0, 5e6)
    assert throughput.tokens_per_second() is None, "no second look yet"
    mark(path, 1050.0, 6e6)
    assert throughput.tokens_per_second() == 20_000.0
    assert throughput.tokens_per_second() is None, "no step was done since"
    mark(path, 1250.0, 7e6)
    assert throughput.tokens_per_second() == 5_000.0, "a stall counts as soon as the next step is done"
    mark(path, 1300.0, 6e6)
    assert throughput.tokens_per_second() is None, "back at a checkpoint: no negative speed"
    mark(path, 1310.0, 6.1e6)
    assert throughput.tokens_per_second() == 10_000.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"at": 1}', '{"at": 1, "tokens": null}', '{"at": "x", "tokens": 1}'])
def test_an_unreadable_progress_file_is_no_speed(text: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(text)
    assert Throughput(tmp_path / "progress.json").tokens_per_second() is None


def test_a_stack_without_a_namespace_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFLEET_METRIC_NAMESPACE", raising=False)
    assert service.main() == 0


def test_the_service_needs_no_torch_and_goes_on_without_network(tmp_path: Path) -> None:
    """The program itself, as systemd starts it, with nothing to reach."""
    fake(tmp_path, "echo '50, 1024'")
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from bootstrap.metrics import __main__ as service\n"
        "window = service.sample_window\n"
        "service.sample_window = lambda reader: window(reader, window_s=0.1, interval_s=0.05)\n"
        "service.main()\n"
    )
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUFLEET_METRIC_NAMESPACE": NAMESPACE,
        "GPUFLEET_REGION": "us-east-1", "GPUFLEET_PROGRESS_FILE": str(tmp_path / "progress.json"),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "metrics are not published, the last hour's are kept: EndpointConnectionError" in line
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == -signal.SIGTERM
        finally:
            process.kill()
