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
    monkeypatch.setenv(DRAIN_FILE_VARIABLE, str(tmp_path / "drain"))
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


def begun(store: LocalStore, *, rank: int = 0) -> Tracer:
    """Tracer that has found its request."""
    traced = Tracer(store, rank=rank, poll_s=0.01)
    traced.start()
    wait_for(lambda: traced._request)
    return traced


def run(traced: Tracer, steps: int = 4) -> None:
    for step in range(5, 5 + steps):
        traced.before_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))


def events(store: LocalStore, name: str) -> list[str]:
    trace: dict[str, Any] = json.loads(gzip.decompress(store.read(name)))
    return [event["name"] for event in trace["traceEvents"]]


def test_the_steps_that_were_asked_for_are_in_the_trace_once(store: LocalStore) -> None:
    request = ask(store)
    traced = begun(store)
    run(traced)
    run(traced)
    traced.close(in_order=True)
    names = events(store, request.trace)
    assert [name for name in names if name.startswith("step ")] == ["step 5", "step 6"]
    assert names.count("aten::mm") == 2
    # torchrun started the workers again: the request has its answer.
    again = Tracer(store, rank=0, poll_s=0.01)
    again.start()
    time.sleep(0.1)
    assert again._request is None
    again.close(in_order=True)


def test_another_rank_takes_no_trace_and_one_that_ends_within_it_does(store: LocalStore) -> None:
    request = ask(store, rank=1)
    first, second = Tracer(store, rank=0, poll_s=0.01), begun(store, rank=1)
    first.start()
    time.sleep(0.1)
    run(first)
    assert store.names(f"traces/{request.id}/") == []
    run(second, steps=1)
    second.close(in_order=True)
    first.close(in_order=True)
    assert "step 5" in events(store, request.trace)


def test_a_profiler_that_does_not_start_says_why(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(store)

    def refuse(**_: object) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(tracer, "profile", refuse)
    traced = begun(store)
    run(traced)
    traced.close(in_order=True)
    assert b"already enabled" in store.read(request.failure)


@pytest.mark.parametrize("text", ["{", '{"id": 1}'])
def test_a_request_that_cannot_be_read_is_logged_once(
    store: LocalStore, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.write(REQUEST, [text.encode()])
    traced = Tracer(store, rank=0, poll_s=0.01)
    traced.start()
    time.sleep(0.1)
    traced.close(in_order=True)
    assert caplog.text.count("requests for traces cannot be read") == 1


def test_an_old_request_and_a_run_without_the_agent_trace_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(store, age=MAX_AGE)
    traced = Tracer(store, rank=0, poll_s=0.01)
    traced.start()
    time.sleep(0.1)
    run(traced)
    traced.close(in_order=True)
    store.delete(REQUEST)
    ask(store)
    monkeypatch.delenv(DRAIN_FILE_VARIABLE)
    alone = Tracer(store, rank=0, poll_s=0.01)
    alone.start()
    time.sleep(0.1)
    run(alone)
    alone.close(in_order=True)
    assert store.names("traces/") == [REQUEST]
