"""The metadata client and the watcher against a real local server, and real signals."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import bootstrap.agent
import bootstrap.training
from bootstrap.agent.settings import Settings
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.imds import Imds, ImdsError
from bootstrap.training.notices import NOTICE_LIMIT_S, SPOT_RESERVE_S, Notice, NoticeFiles
from bootstrap.training.watcher import POLL_INTERVAL_S, Watcher, main
from examples.local_imds import LocalImds


@pytest.fixture
def service() -> Iterator[LocalImds]:
    with LocalImds().running() as running:
        yield running


@pytest.fixture
def client(service: LocalImds) -> Imds:
    return Imds(service.endpoint, timeout_s=0.5)


@pytest.fixture
def files(tmp_path: Path) -> NoticeFiles:
    return NoticeFiles(tmp_path / "run" / "drain")


def watch_once(client: Imds, *, files: NoticeFiles | None = None) -> Watcher:
    watcher = Watcher(client, signals=False, files=files)
    watcher.poll_imds(client)
    return watcher


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_absent_path_is_none_and_one_token_serves_many_requests(service: LocalImds, client: Imds) -> None:
    assert client.get("spot/instance-action") is None
    assert client.get("instance-id") == "i-0123456789abcdef0"
    assert [request for request in service.requests if request.startswith("PUT")] == ["PUT /latest/api/token 200"]


def test_expired_token_is_renewed(service: LocalImds, client: Imds) -> None:
    client.get("instance-id")
    service.forget_tokens()
    assert client.get("instance-id") == "i-0123456789abcdef0"
    assert [request.split()[-1] for request in service.requests] == ["200", "200", "401", "200", "200"]


def test_endpoint_comes_from_the_sdks_variable(service: LocalImds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Imds().get("instance-id") == "i-0123456789abcdef0"


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1", "169.254.169.254", "http://"])
def test_unusable_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ImdsError, match="http://HOST"):
        Imds(endpoint)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_fault_is_an_error_and_not_an_interruption(service: LocalImds, client: Imds, status: int) -> None:
    service.statuses["spot/instance-action"] = status
    with pytest.raises(ImdsError, match=str(status)):
        client.get("spot/instance-action")
    assert watch_once(client).stop_notice is None
    service.values["autoscaling/target-lifecycle-state"] = "Terminated"
    notice = watch_once(client).stop_notice
    assert notice is not None and notice.source == "autoscaling/target-lifecycle-state"


def test_unreachable_service_is_logged_once_and_is_not_an_interruption(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = Imds(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.2)
        watcher = Watcher(client, signals=False)
        with caplog.at_level(logging.WARNING):
            watcher.poll_imds(client)
            watcher.poll_imds(client)
    assert watcher.stop_notice is None
    assert len(caplog.records) == 1 and "not taken as an interruption" in caplog.text


@pytest.mark.parametrize("garbage", ["<html>", "[]", "{}", '{"action": 3}'])
def test_unreadable_spot_notice_saves_and_goes_on(service: LocalImds, client: Imds, garbage: str) -> None:
    service.values["spot/instance-action"] = garbage
    watcher = watch_once(client)
    assert watcher.stop_notice is None and watcher.save_notice is not None
    watcher.save_notice = None
    watcher.poll_imds(client)
    assert watcher.save_notice is None


@pytest.mark.parametrize(
    ("path", "value", "detail"),
    [
        ("spot/instance-action", '{"action": "stop"}', "stop at unknown time"),
        ("spot/instance-action", '{"action": "hibernate", "time": "now"}', "hibernate at now"),
        *(("autoscaling/target-lifecycle-state", state, "") for state in ("InService", "Detached", "Standby")),
        ("autoscaling/target-lifecycle-state", "Terminated", "Terminated"),
    ],
)
def test_notices_that_end_the_node(service: LocalImds, client: Imds, path: str, value: str, detail: str) -> None:
    service.values[path] = value
    assert str(watch_once(client).stop_notice) == (f"{path} ({detail})" if detail else "None")


def reader(files: NoticeFiles, *, answers: bool = False) -> Watcher:
    """A training process's watcher, which looked once."""
    watcher = Watcher(None, files=files, answers=answers, signals=False)
    watcher.start()
    return watcher


def test_notice_goes_through_the_drain_file_and_the_answer_comes_back(
    service: LocalImds, client: Imds, files: NoticeFiles
) -> None:
    service.interrupt()
    watch_once(client, files=files)
    with closing(reader(files, answers=True)) as training:
        notice = training.stop_notice
        assert notice is not None and notice.source == "spot/instance-action"
        assert notice.detail.startswith("terminate at 20")
        assert (files.path.parent / "drain.listener").exists()
        training.announce_saved()
        assert (files.path.parent / "drain.saved").exists()
    assert not (files.path.parent / "drain.listener").exists(), "the agent would wait for a process that is gone"


@pytest.mark.parametrize(("leaves", "answers"), [(True, False), (False, True)])
def test_one_process_of_a_node_that_leaves_answers(
    service: LocalImds, client: Imds, files: NoticeFiles, leaves: bool, answers: bool
) -> None:
    if leaves:
        service.interrupt()
    watch_once(client, files=files)
    training = reader(files, answers=answers)
    training.announce_saved()
    training.close()
    assert [path.name for path in files.path.parent.glob("*")] == ["drain"] * leaves


def test_scheduled_maintenance_asks_for_a_checkpoint_once_and_ends_nothing(service: LocalImds, client: Imds) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/viewing_scheduled_events.html"""
    event = {"NotBefore": "5 Dec 2026 09:00:43 GMT", "Code": "instance-retirement", "State": "completed"}
    watcher = Watcher(client, signals=False)
    for value in ("[]", "not JSON", json.dumps([event])):
        service.values["events/maintenance/scheduled"] = value
        watcher.poll_imds(client)
        assert watcher.save_notice is None
    service.values["events/maintenance/scheduled"] = json.dumps([{**event, "State": "active"}])
    watcher.poll_imds(client)
    assert str(watcher.save_notice) == (
        "events/maintenance/scheduled (instance-retirement from 5 Dec 2026 09:00:43 GMT)"
    )
    watcher.save_notice = None
    watcher.poll_imds(client)
    assert (watcher.save_notice, watcher.stop_notice) == (None, None)


def test_rebalance_goes_through_the_drain_file_once(service: LocalImds, client: Imds, files: NoticeFiles) -> None:
    service.recommend_rebalance()
    node = watch_once(client, files=files)
    training = Watcher(None, files=files, signals=False)
    looks = iter((False, False, True))
    training.watch(lambda: next(looks))
    assert training.stop_notice is None and training.save_notice is not None
    assert training.save_notice.source == "events/recommendations/rebalance"
    training.save_notice = None
    looks = iter((False, True))
    training.watch(lambda: next(looks))
    assert training.save_notice is None, "the same recommendation asked twice"
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "2031-01-01T00:00:00Z"}'
    node.poll_imds(client)
    looks = iter((False, True))
    training.watch(lambda: next(looks))
    assert training.save_notice is not None, "a new recommendation did not ask"


def seconds_left(notice: Notice | None) -> float:
    assert notice is not None
    return notice.save_by - time.time()


def test_time_to_save_is_the_hooks_or_the_notices(
    service: LocalImds, client: Imds, files: NoticeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.values["autoscaling/target-lifecycle-state"] = "Terminated"
    node = watch_once(client, files=files)
    assert 800 < seconds_left(files.read_stop()) <= 900
    first = files.read_stop()
    node.poll_imds(client)
    assert files.read_stop() == first, "the same notice pushed its limit on"
    # EC2 takes it before the hook would: what is left of the two minutes counts, less what torchrun needs to end.
    service.interrupt()
    node.poll_imds(client)
    assert 0 < seconds_left(files.read_stop()) <= 75
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 50))
    service.values["spot/instance-action"] = f'{{"action": "stop", "time": "{soon}"}}'
    assert seconds_left(watch_once(client).stop_notice) <= 10
    monkeypatch.setenv("GPUFLEET_SCALE_IN_LIMIT_S", "30")
    del service.values["spot/instance-action"]
    assert seconds_left(watch_once(client).stop_notice) <= 30


def test_a_training_process_learns_that_less_time_is_left(files: NoticeFiles) -> None:
    files.write_stop(
        Notice(source="autoscaling/target-lifecycle-state", detail="Terminated", save_by=time.time() + 900)
    )
    training = Watcher(None, files=files, signals=False)
    training.watch(iter((False, True)).__next__)
    files.write_stop(Notice(source="spot/instance-action", detail="", save_by=time.time() + 50))
    files.write_stop(Notice(source="later", detail="", save_by=time.time() + 800))
    training.watch(iter((False, True)).__next__)
    assert training.stop_notice is not None and training.stop_notice.source == "spot/instance-action"
    assert seconds_left(training.stop_notice) <= 50


@pytest.mark.parametrize("text", ["", "soon", "123"])
def test_unreadable_drain_file_is_the_shorter_drain(files: NoticeFiles, text: str) -> None:
    files.path.parent.mkdir()
    files.path.write_text(text)
    notice = reader(files).stop_notice
    assert notice is not None and notice.source == "drain-file"
    assert 0 < seconds_left(notice) <= 75


def test_command_watches_until_a_notice_and_nothing_where_it_must_not(
    service: LocalImds, files: NoticeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    service.values["autoscaling/target-lifecycle-state"] = "Terminated"
    for disabled, notice in (("true", "None"), ("", "autoscaling/target-lifecycle-state (Terminated)")):
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", disabled)
        assert main([str(files.path), "--once"]) == 0
        assert str(files.read_stop()) == notice


def test_the_watcher_ends_with_the_process_that_started_it(
    service: LocalImds, files: NoticeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"{sys.executable} -m bootstrap.training.watcher {files.path} & echo $!; exec sleep 600"
    environment = {**os.environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint, "GPUFLEET_IMDS_POLL_S": "0.1"}
    environment.pop("AWS_EC2_METADATA_DISABLED", None)
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        watcher = int(parent.stdout.readline())
        assert eventually(lambda: any("spot/instance-action" in request for request in service.requests))
        parent.kill()
        parent.wait()
        assert eventually(lambda: not Path(f"/proc/{watcher}").exists())


def test_what_runs_in_the_systems_python_is_no_newer_than_ubuntus_oldest() -> None:
    """Ubuntu 22.04 has Python 3.10, and torch is not there."""
    package, agent = Path(bootstrap.training.__file__).parent, Path(bootstrap.agent.__file__).parent
    names = ("__init__", "watcher", "notices", "imds", "environment", "errors")
    for path in (*(package / f"{name}.py" for name in names), *agent.glob("*.py")):
        source = path.read_text()
        ast.parse(source, feature_version=(3, 10))
        assert "datetime import UTC" not in source and "import Self" not in source
        imported = {alias.split(".")[0] for alias in re.findall(r"^ *(?:from|import) ([\w.]+)", source, re.MULTILINE)}
        assert imported <= set(sys.stdlib_module_names) | {"bootstrap"}, path.name


def test_thread_survives_what_it_did_not_expect(client: Imds, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def explode(path: str) -> str | None:
        calls.append(path)
        raise RuntimeError("not an ImdsError")

    monkeypatch.setattr(client, "get", explode)
    with closing(Watcher(client, poll_interval_s=0.02, signals=False)) as watcher:
        watcher.start()
        assert eventually(lambda: len(calls) >= 3)
        assert watcher.stop_notice is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_asks_to_stop_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with closing(Watcher(None)) as watcher:
        watcher.start()
        os.kill(os.getpid(), number)
        assert eventually(lambda: watcher.stop_notice is not None)
        assert watcher.stop_notice is not None and watcher.stop_notice.source == number.name
    assert signal.getsignal(number) is before


def test_second_interrupt_key_ends_at_once() -> None:
    with closing(Watcher(None)) as watcher:
        watcher.start()
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: watcher.stop_notice is not None)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver", "loader", "other"])
def test_processes_that_a_training_starts_end_as_without_us(way: str) -> None:
    """Each had our SIGTERM handler: a training with a Pool in its steps hung in the fourth Pool's __exit__."""
    command = [sys.executable, "-m", "tests.unit.bootstrap.training.user_processes", way]
    subprocess.run(command, check=True, timeout=300)


def test_a_watcher_made_before_a_fork_works_in_the_process_that_starts_it() -> None:
    """A launcher of notebooks forks its ranks, which then start what the parent made."""
    watcher = Watcher(None)
    child = os.fork()
    if not child:
        watcher.start()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0 if watcher.stop_notice is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_only_local_rank_0_asks_the_service(monkeypatch: pytest.MonkeyPatch, service: LocalImds) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    monkeypatch.delenv("GPUFLEET_DRAIN_FILE", raising=False)
    service.interrupt()
    for rank, disabled, sees in (("0", "", True), ("1", "", False), ("0", "true", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", disabled)
        with closing(Watcher.from_environment()) as watcher:
            watcher.start()
            assert eventually(lambda w=watcher: w.stop_notice is not None, 60.0 if sees else 0.3) is sees  # type: ignore[misc]


@pytest.mark.parametrize("name", ["GPUFLEET_DRAIN_LIMIT_S", "GPUFLEET_SCALE_IN_LIMIT_S", "GPUFLEET_IMDS_POLL_S"])
def test_a_wrong_limit_is_an_error_before_any_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigurationError, match=f"{name} is 'soon'; expected seconds above 0"):
        Watcher.from_environment()


def test_a_process_that_launch_started_reads_the_drain_file_alone(
    monkeypatch: pytest.MonkeyPatch, service: LocalImds, files: NoticeFiles
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    monkeypatch.setenv("GPUFLEET_DRAIN_FILE", str(files.path))
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with closing(Watcher.from_environment()) as watcher:
            watcher.start()
            assert (files.path.parent / "drain.listener").exists() is (rank == "0")
    assert service.requests == []


def test_times_of_a_drain_fit_into_the_two_minutes_of_a_spot_notice() -> None:
    """One place for each number, and together they are what EC2 and systemd give."""
    agent = "".join(path.read_text() for path in Path(bootstrap.agent.__file__).parent.glob("*.py"))
    unit = (Path(bootstrap.training.__file__).parents[1] / "gpufleet-train.service").read_text()
    kill_after_s = Settings({}).limits.kill_after_s
    stop_s = float(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    assert kill_after_s > 30, "torchrun's own SIGKILL comes first"
    assert NOTICE_LIMIT_S + kill_after_s < stop_s
    assert POLL_INTERVAL_S + stop_s < 120
    assert POLL_INTERVAL_S + kill_after_s < SPOT_RESERVE_S
    assert "DRAIN_LIMIT_S" not in agent and "SCALE_IN_LIMIT_S" not in agent
