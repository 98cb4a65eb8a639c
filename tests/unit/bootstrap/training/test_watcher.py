"""The metadata client and the watcher against a real local server, and real signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootstrap.training.imds import Imds, ImdsError
from bootstrap.training.watcher import Watcher
from examples.local_imds import LocalImds


@pytest.fixture
def service() -> Iterator[LocalImds]:
    with LocalImds().running() as running:
        yield running


@pytest.fixture
def client(service: LocalImds) -> Imds:
    return Imds(service.endpoint, timeout_s=0.5)


def watch_once(client: Imds, *, drain_file: Path | None = None) -> Watcher:
    watcher = Watcher(client, signals=False, drain_file=drain_file)
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


def test_token_is_renewed_before_its_life_ends(service: LocalImds) -> None:
    client = Imds(service.endpoint, token_ttl_s=1)
    client.get("instance-id")
    time.sleep(0.85)
    client.get("instance-id")
    assert sum(request.startswith("PUT") for request in service.requests) == 2
    assert not any(request.endswith("401") for request in service.requests)


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
    service.statuses = dict.fromkeys(("spot/instance-action", "autoscaling/target-lifecycle-state"), status)
    with pytest.raises(ImdsError, match=str(status)):
        client.get("spot/instance-action")
    assert watch_once(client).stop_notice is None


def test_fault_of_one_path_does_not_hide_another(service: LocalImds, client: Imds) -> None:
    service.statuses["spot/instance-action"] = 500
    service.values["autoscaling/target-lifecycle-state"] = "Terminated"
    notice = watch_once(client).stop_notice
    assert notice is not None and notice.source == "autoscaling/target-lifecycle-state"


def test_hanging_service_times_out_and_is_not_an_interruption(service: LocalImds) -> None:
    service.delay_s = 120.0
    client = Imds(service.endpoint, timeout_s=0.1)
    began = time.monotonic()
    assert watch_once(client).stop_notice is None
    assert time.monotonic() - began < 60


def test_unreachable_service_is_logged_once_and_is_not_an_interruption(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = Imds(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.2)
        watcher = Watcher(client, signals=False)
        with caplog.at_level(logging.WARNING):
            assert watcher.poll_imds(client) is False
            watcher.poll_imds(client)
    assert watcher.stop_notice is None
    assert len(caplog.records) == 1 and "not taken as an interruption" in caplog.text


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_spot_notice_asks_to_stop(service: LocalImds, client: Imds, action: str) -> None:
    service.interrupt(action)
    notice = watch_once(client).stop_notice
    assert notice is not None and notice.source == "spot/instance-action" and notice.detail.startswith(action)


def test_rebalance_asks_to_save_once_and_to_go_on(service: LocalImds, client: Imds) -> None:
    service.recommend_rebalance()
    watcher = watch_once(client)
    assert watcher.stop_notice is None and watcher.save_notice is not None
    watcher.save_done()
    watcher.poll_imds(client)
    assert watcher.save_notice is None, "the same recommendation asked twice"
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "2031-01-01T00:00:00Z"}'
    watcher.poll_imds(client)
    assert watcher.save_notice is not None, "a new recommendation did not ask"


@pytest.mark.parametrize("garbage", ["<html>", "[]", "{}", '{"action": 3}'])
def test_unreadable_spot_notice_saves_and_goes_on(service: LocalImds, client: Imds, garbage: str) -> None:
    service.values["spot/instance-action"] = garbage
    watcher = watch_once(client)
    assert watcher.stop_notice is None and watcher.save_notice is not None
    watcher.save_done()
    watcher.poll_imds(client)
    assert watcher.save_notice is None


@pytest.mark.parametrize(
    ("state", "leaves"),
    [("InService", False), ("Detached", False), ("Standby", False), ("Terminated", True), ("Warmed:Stopped", True)],
)
def test_lifecycle_states(service: LocalImds, client: Imds, state: str, leaves: bool) -> None:
    service.values["autoscaling/target-lifecycle-state"] = state
    assert (watch_once(client).stop_notice is not None) is leaves


def test_notice_is_passed_to_launch_and_saved_state_too(service: LocalImds, client: Imds, tmp_path: Path) -> None:
    drain = tmp_path / "run" / "drain"
    service.interrupt()
    watcher = watch_once(client, drain_file=drain)
    assert "spot/instance-action" in drain.read_text()
    watcher.announce_saved()
    assert (tmp_path / "run" / "drain.saved").exists()


def test_node_that_stays_announces_nothing(tmp_path: Path) -> None:
    Watcher(None, signals=False, drain_file=tmp_path / "drain").announce_saved()
    assert list(tmp_path.iterdir()) == []


def test_thread_sees_a_notice_and_the_drain_file(service: LocalImds, client: Imds, tmp_path: Path) -> None:
    by_service = Watcher(client, poll_interval_s=0.05, signals=False)
    by_file = Watcher(None, drain_file=tmp_path / "drain", signals=False)
    by_service.start()
    by_file.start()
    try:
        time.sleep(0.2)
        assert by_service.stop_notice is None and by_file.stop_notice is None
        service.interrupt()
        (tmp_path / "drain").touch()
        assert eventually(lambda: by_service.stop_notice is not None and by_file.stop_notice is not None)
    finally:
        by_service.close()
        by_file.close()


def test_thread_survives_what_it_did_not_expect(client: Imds, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def explode(path: str) -> str | None:
        calls.append(path)
        raise RuntimeError("not an ImdsError")

    monkeypatch.setattr(client, "get", explode)
    watcher = Watcher(client, poll_interval_s=0.02, signals=False)
    watcher.start()
    try:
        assert eventually(lambda: len(calls) >= 3)
        assert watcher.stop_notice is None
    finally:
        watcher.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_asks_to_stop_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    watcher = Watcher(None)
    watcher.start()
    try:
        os.kill(os.getpid(), number)
        assert eventually(lambda: watcher.stop_notice is not None)
        assert watcher.stop_notice is not None and watcher.stop_notice.source == number.name
    finally:
        watcher.close()
    assert signal.getsignal(number) is before


def test_second_interrupt_key_ends_at_once() -> None:
    watcher = Watcher(None)
    watcher.start()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: watcher.stop_notice is not None)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        watcher.close()


def test_other_threads_may_start_a_watcher() -> None:
    problems: list[BaseException] = []

    def use() -> None:
        try:
            watcher = Watcher(None)
            watcher.start()
            watcher.close()
        except BaseException as error:  # noqa: BLE001 - reported below
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert problems == []


def test_only_local_rank_0_asks_the_service(monkeypatch: pytest.MonkeyPatch, service: LocalImds) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    service.interrupt()
    for rank, disabled, sees in (("0", "", True), ("1", "", False), ("0", "true", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", disabled)
        watcher = Watcher.from_environment()
        watcher.start()
        try:
            assert eventually(lambda w=watcher: w.stop_notice is not None, 60.0 if sees else 0.3) is sees  # type: ignore[misc]
        finally:
            watcher.close()
