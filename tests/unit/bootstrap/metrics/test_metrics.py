"""The publisher against moto's CloudWatch, a fake nvidia-smi and everything that may go wrong between them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto import mock_aws

from bootstrap.contract.gpus import GpuMinute, NodeMinute, read_minute
from bootstrap.logs.upload import LogStream
from bootstrap.metrics import __main__ as service
from bootstrap.metrics.gpus import GpuReader, GpuSample, parse
from bootstrap.metrics.minute import MinuteLog, node_minute
from bootstrap.metrics.program import Program
from bootstrap.metrics.prometheus import CONTENT_TYPE, Exporter, exposition
from bootstrap.metrics.publish import KEPT_POINTS, Point, Publisher, points
from bootstrap.metrics.throughput import Throughput
from bootstrap.metrics.traffic import Traffic, TrafficReader, parse_nvlink, parse_pcie, parse_xids

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


def says(busy: object, memory_mib: int) -> str:
    """A shell line that answers as nvidia-smi for GPU 0, which reports nothing else."""
    return f"echo '0, {busy}, {memory_mib}{', [N/A]' * 7}'"


def test_means_of_the_minute_and_the_fullest_gpu(cloudwatch: Any) -> None:
    samples = [
        GpuSample(index=0, utilization_percent=percent, memory_used_gib=gib)
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
    measured = points([GpuSample(index=0, memory_used_gib=3.0)], None, NOW)
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
        # A H100 with driver 580.
        (
            "0, 87, 40536, 81559, 69.28, 33, 345, 0x0000000000000001, 0, 2",
            GpuSample(
                index=0,
                utilization_percent=87.0,
                memory_used_gib=40536 / 1024,
                memory_total_gib=81559 / 1024,
                power_w=69.28,
                temperature_celsius=33.0,
                sm_clock_mhz=345.0,
                slowed_by=(),
                ecc_corrected=0.0,
                ecc_uncorrected=2.0,
            ),
        ),
        # 0x68 is hardware slowdown, thermal of software and of hardware.
        (
            "3, 50, 1024, [N/A], [N/A], 92, 800, 0x0000000000000068, [N/A], [N/A]",
            GpuSample(
                index=3,
                utilization_percent=50.0,
                memory_used_gib=1.0,
                temperature_celsius=92.0,
                sm_clock_mhz=800.0,
                slowed_by=("hardware slowdown", "software thermal", "hardware thermal"),
            ),
        ),
        (f"1, [N/A], 1024{', [N/A]' * 7}", GpuSample(index=1, memory_used_gib=1.0)),
        (f"1{', [GPU is lost]' * 9}", None),
        (f"1{', [N/A]' * 9}", None),
        ("Unable to determine the device handle for GPU0000:B7:00.0: Unknown Error", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, expected: GpuSample | None) -> None:
    assert parse(line) == expected


def test_a_gpu_that_fell_off_hides_no_other(tmp_path: Path) -> None:
    lines = [says(91, 30720), "echo 'Unable to determine the device handle for GPU0000:B7:00.0'", "exit 15"]
    samples = GpuReader(fake(tmp_path, "\n".join(lines))).read()
    assert samples == [GpuSample(index=0, utilization_percent=91.0, memory_used_gib=30.0)]


@pytest.mark.parametrize("body", ["exit 9", "echo 'No devices were found'", ""])
def test_no_answer_is_no_sample_and_told_once(body: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = GpuReader(fake(tmp_path, body))
    with caplog.at_level(logging.INFO):
        assert reader.read() == reader.read() == []
        assert len(caplog.records) == 1
        fake(tmp_path, says(1, 1024))
        assert len(reader.read()) == 1
    assert caplog.records[-1].message == "nvidia-smi answers again"


def test_no_nvidia_smi_is_no_sample(tmp_path: Path) -> None:
    assert GpuReader([str(tmp_path / "nvidia-smi")]).read() == []


def test_nvidia_smi_that_hangs_is_asked_no_second_time_while_it_does(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    reader = GpuReader(fake(tmp_path, f"echo >>{calls}\nexec sleep 600"), timeout_s=0.3)
    assert reader.read() == []
    program = reader._program
    stuck = program._stuck
    assert stuck is not None
    # Killed and still there, like a process in the driver.
    program._stuck = subprocess.Popen(["sleep", "600"], text=True, stdout=subprocess.PIPE)
    assert reader.read() == []
    assert calls.read_text().count("\n") == 1
    program._stuck.kill()
    program._stuck.communicate()
    stuck.communicate()
    fake(tmp_path, says(1, 1024))
    assert len(reader.read()) == 1


def test_a_window_is_sampled_all_along(tmp_path: Path) -> None:
    count = f"echo >>{tmp_path}/calls\nn=$(wc -l <{tmp_path}/calls)\n"
    reader = GpuReader(fake(tmp_path, count + says("'$n'", 1024)))
    samples = service.sample_window(reader, window_s=0.5, interval_s=0.1)
    assert [sample.utilization_percent for sample in samples] == [1.0, 2.0, 3.0, 4.0, 5.0]


def sample(index: int, busy: float, **values: Any) -> GpuSample:
    return GpuSample(index=index, utilization_percent=busy, **values)


def test_a_minute_folds_the_samples_of_each_gpu() -> None:
    samples = [
        sample(0, 100.0, memory_used_gib=70.0, power_w=600.0, slowed_by=("hardware thermal",), ecc_uncorrected=0.0),
        sample(1, 10.0, memory_used_gib=1.0),
        sample(0, 90.0, memory_used_gib=71.0, power_w=500.0, slowed_by=(), ecc_uncorrected=1.0),
        sample(1, 20.0, memory_used_gib=2.0),
    ]
    traffic = Traffic(pcie={0: {"rx": 12.0, "tx": 3.0}}, nvlink={1: {"rx": 5.04, "tx": 0.0}}, efa={"tx": 9.0})
    minute = node_minute(samples, traffic, NOW)
    assert list(minute.gpus) == ["0", "1"]
    first, second = minute.gpus.values()
    assert (first.busy_percent, first.memory_used_gib, first.power_w) == (95.0, 71.0, 550.0)
    assert first.throttled == {"hardware thermal": 0.5} and first.ecc_uncorrected == 1
    assert (first.pcie_rx_mb_per_s, first.nvlink_rx_mb_per_s) == (12.0, None)
    assert (second.busy_percent, second.power_w, second.nvlink_rx_mb_per_s) == (15.0, None, 5.0)
    assert (minute.efa_tx_mb_per_s, minute.efa_rx_mb_per_s) == (9.0, None)
    assert read_minute(minute.to_text(), "a line") == minute
    # docs/bootstrap.md counts with it.
    full: dict[str, Any] = dict.fromkeys(GpuMinute.__dataclass_fields__, 12345.6)
    full["throttled"] = {"hardware slowdown": 0.5}
    eight = NodeMinute(at=NOW, gpus={str(gpu): GpuMinute(**full) for gpu in range(8)})
    assert len(eight.to_text()) < 3200


# "nvidia-smi nvlink --getthroughput d", of a GPU with two links.
NVLINK = """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: Data Tx: {tx} KiB
\t Link 0: Data Rx: 1000 KiB
\t Link 1: Data Tx: 1000 KiB
\t Link 1: Data Rx: N/A
"""
PCIE = "# gpu  rxpci  txpci \n# Idx   MB/s   MB/s \n    0     12      3 \n    1      -      - \n"
KERNEL = """[ 1.0] NVRM: Xid (PCI:0000:59:00): 94, pid='<unknown>', name=<unknown>, Contained error
[ 2.0] NVRM: Xid (PCI:0000:59:00): 94, pid=7
[ 3.0] NVRM: Xid (PCI:0000:60:00): 31, pid=7
[ 4.0] EXT4-fs (nvme0n1p1): mounted
"""


def test_what_the_tools_print_is_read() -> None:
    assert parse_nvlink(NVLINK.format(tx=5)) == {(0, "tx"): 1005 * 1024, (0, "rx"): 1000 * 1024}
    assert parse_pcie(PCIE) == {0: {"rx": 12.0, "tx": 3.0}}
    assert parse_xids(KERNEL) == {"94": 2, "31": 1}
    assert not parse_nvlink("") and not parse_pcie("") and not parse_xids("")


def test_rates_are_of_the_time_between_two_looks(tmp_path: Path) -> None:
    counters = tmp_path / "efa_0/ports/1/hw_counters"
    counters.mkdir(parents=True)
    link, now = tmp_path / "link", [0.0]
    reader = TrafficReader(
        nvlink=Program(["cat", str(link)]), pcie=Program(["absent-nvidia-smi"]), kernel_log=Program(["false"]),
        efa_cards=tmp_path, clock=lambda: now[0],
    )  # fmt: skip

    def look(at: float, *, tx_kib: int, sent: int) -> Traffic:
        now[0] = at
        link.write_text(NVLINK.format(tx=tx_kib))
        (counters / "tx_bytes").write_text(f"{sent}\n")
        return reader.read()

    assert look(0, tx_kib=0, sent=0) == Traffic(), "no second look yet"
    second = look(60, tx_kib=60_000_000, sent=120_000_000)
    assert second.nvlink == {0: {"tx": pytest.approx(1024.0), "rx": 0.0}} and second.efa == {"tx": 2.0}
    assert not second.pcie and not second.xids, "neither is there"
    assert look(120, tx_kib=0, sent=0) == Traffic(nvlink={0: {"rx": 0.0}}), "the driver counts anew"


def test_minutes_reach_the_nodes_stream_also_after_a_failure(cloudwatch: Any) -> None:
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName="/gpufleet/dev")
    failures = [NO_NETWORK]

    def stream() -> LogStream:
        if failures:
            raise failures.pop()
        return LogStream(logs, "/gpufleet/dev", "gpus/i-1")

    log = MinuteLog(stream)
    minutes = [NodeMinute(at=NOW - timedelta(minutes=2 - i), gpus={"0": GpuMinute(busy_percent=i)}) for i in (0, 1)]
    for minute in minutes:
        log.send(minute)
    events = logs.filter_log_events(logGroupName="/gpufleet/dev", logStreamNamePrefix="gpus/")["events"]
    assert [read_minute(event["message"], "event") for event in events] == minutes
    assert [event["timestamp"] for event in events] == [int(minute.at.timestamp() * 1000) for minute in minutes]


def test_a_pods_minutes_are_in_its_nodes_stream(
    cloudwatch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The metadata service does not answer a pod; the host writes the id beside the notices, maybe a little later."""
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName="/gpufleet/dev")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GPUFLEET_RUN_DIR", str(tmp_path))
    log = service.minute_log(logs, "/gpufleet/dev")
    assert log is not None and service.minute_log(logs, "") is None
    for text in (None, "\n", "i-0123456789abcdef0\n"):
        if text is not None:
            (tmp_path / "instance-id").write_text(text)
        log.send(NodeMinute(at=NOW, gpus={}))
    assert "not sent" in caplog.text
    events = logs.filter_log_events(logGroupName="/gpufleet/dev")["events"]
    assert [event["logStreamName"] for event in events] == ["gpus/i-0123456789abcdef0"] * 3


def test_prometheus_reads_the_last_minute_in_base_units() -> None:
    exporter = Exporter(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"", "before the first minute"
    gpu = GpuMinute(busy_percent=87.5, memory_used_gib=1.0, sm_clock_mhz=1980, throttled={"power brake": 0.25})
    minute = NodeMinute(at=NOW, gpus={"0": gpu, "1": GpuMinute(power_w=70.0)}, xids={"94": 2}, efa_rx_mb_per_s=1.5)
    exporter.show(minute, 1000.0)
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        text = answer.read().decode()
    lines = text.splitlines()
    assert 'gpufleet_gpu_utilization_ratio{gpu="0"} 0.875' in lines
    assert 'gpufleet_gpu_memory_used_bytes{gpu="0"} 1073741824' in lines
    assert 'gpufleet_gpu_sm_clock_hertz{gpu="0"} 1980000000' in lines
    assert 'gpufleet_gpu_power_watts{gpu="1"} 70' in lines
    assert 'gpufleet_gpu_throttled_ratio{gpu="0",reason="power brake"} 0.25' in lines
    assert 'gpufleet_xid_messages{xid="94"} 2' in lines
    assert "gpufleet_efa_receive_bytes_per_second 1500000" in lines and "gpufleet_tokens_per_second 1000" in lines
    assert "transmit" not in text, "nobody measured it"
    # Each metric's lines are together, below one HELP and one TYPE.
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed)) and {line.split("{")[0].split()[0] for line in lines if line[0] != "#"} == {
        *typed
    }
    assert exposition(minute, None).endswith("\n")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/")


def test_a_taken_port_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    taken = Exporter(("127.0.0.1", 0))
    second = Exporter(("127.0.0.1", taken.port))
    second.show(NodeMinute(at=NOW, gpus={}), None)
    assert second.port == 0 and "no Prometheus endpoint" in caplog.text


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
    fake(tmp_path, says(50, 1024))
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from bootstrap.metrics import __main__ as service\n"
        "window = service.sample_window\n"
        "service.sample_window = lambda reader: window(reader, window_s=0.1, interval_s=0.05)\n"
        "exporter = service.Exporter\n"
        "service.Exporter = lambda: exporter(('127.0.0.1', 0))\n"
        "service.main()\n"
    )
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUFLEET_METRIC_NAMESPACE": NAMESPACE,
        "GPUFLEET_REGION": "us-east-1", "GPUFLEET_PROGRESS_FILE": str(tmp_path / "progress.json"),
        "GPUFLEET_LOG_GROUP": "",
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
