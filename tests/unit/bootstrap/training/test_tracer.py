"""Traces on demand, by the real profiler on the CPU."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.contract.trace import MAX_AGE, REQUEST, TraceRequest
from bootstrap.training import tracer
from bootstrap.training.notices import DRAIN_FILE_VARIABLE
from bootstrap.training.stores import LocalStore
from bootstrap.training.tracer import Tracer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(DRAIN_FILE_VARIABLE, str(tmp_path / "run/drain"))
    return LocalStore(tmp_path / "store")


def ask(store: LocalStore, name: str = "first", *, rank: int = 0, age: timedelta = timedelta(0)) -> TraceRequest:
    request = TraceRequest(id=name, rank=rank, steps=2, at=datetime.now(UTC) - age, by="ada")
    store.write(REQUEST, [request.to_text().encode()])
    return request


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(traced: Tracer, steps: int = 4) -> None:
    for step in range(5, 5 + steps):
        traced.before_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def failure_of(request: TraceRequest, store: LocalStore) -> bytes:
    """Reason that a tracer, whose run goes on until then, gives for taking no trace."""
    traced = Tracer(store, rank=0, local_rank=0, poll_s=0.01)
    traced.start()

    def tried() -> bool:
        traced._looked_at = 0.0
        traced.before_step(5)
        return bool(store.names(request.failure))

    wait_for(tried)
    traced.close(in_order=True)
    return store.read(request.failure)


def events(store: LocalStore, name: str) -> list[str]:
    trace: dict[str, Any] = json.loads(gzip.decompress(store.read(name)))
    return [event["name"] for event in trace["traceEvents"]]


def test_the_steps_that_were_asked_for_are_in_the_trace_once(store: LocalStore, tmp_path: Path) -> None:
    request = ask(store)
    file = tmp_path / "run/trace-request.json"
    file.write_text("of an earlier start")
    traced = Tracer(store, rank=0, local_rank=0, poll_s=0.01)
    traced.start()
    wait_for(lambda: file.exists() and "ada" in file.read_text())
    run(traced)
    run(traced)
    traced.close(in_order=True)
    names = events(store, request.trace)
    assert [name for name in names if name.startswith("step ")] == ["step 5", "step 6"]
    assert names.count("aten::mm") == 2
    # torchrun started the workers again: the request has its answer.
    again = Tracer(store, rank=0, local_rank=0, poll_s=0.01)
    again.start()
    time.sleep(0.1)
    assert not file.exists()
    again.close(in_order=True)


def test_another_rank_of_the_node_reads_the_request_from_the_file(store: LocalStore, tmp_path: Path) -> None:
    request = ask(store, rank=1)
    first, second = (Tracer(store, rank=rank, local_rank=rank, poll_s=0.01) for rank in (0, 1))
    for traced in (first, second):
        traced.start()
    wait_for((tmp_path / "run/trace-request.json").exists)
    run(first)
    assert store.names(f"traces/{request.id}/") == []
    run(second, steps=1)  # the run ends within the trace
    second.close(in_order=True)
    first.close(in_order=True)
    assert "step 5" in events(store, request.trace)


def test_a_profiler_that_does_not_start_says_why(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(store)

    def refuse(**_: object) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(tracer, "profile", refuse)
    assert b"already enabled" in failure_of(request, store)


@pytest.mark.parametrize("text", ["{", '{"id": 1}'])
def test_a_request_that_cannot_be_read_is_logged_once(
    store: LocalStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(REQUEST, [text.encode()])
    traced = Tracer(store, rank=0, local_rank=0, poll_s=0.01)
    traced.start()
    time.sleep(0.1)
    traced.close(in_order=True)
    assert caplog.text.count("requests for traces cannot be read") == 1


def test_an_old_request_and_a_run_without_the_agent_trace_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(store, age=MAX_AGE)
    traced = Tracer(store, rank=0, local_rank=0, poll_s=0.01)
    traced.start()
    time.sleep(0.1)
    run(traced)
    traced.close(in_order=True)
    monkeypatch.delenv(DRAIN_FILE_VARIABLE)
    alone = Tracer(store, rank=0, local_rank=0)
    alone.start()
    run(alone)
    assert list((tmp_path / "run").iterdir()) == [] and store.names("traces/") == [REQUEST]
