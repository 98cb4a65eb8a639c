"""The progress file: written by the run, read by the metrics publisher."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bootstrap.agent import node as node_module
from bootstrap.agent.node import Telemetry
from bootstrap.training import SpotTolerantRun, Watcher
from bootstrap.training import progress as module
from bootstrap.training.progress import ProgressFile, read_step
from bootstrap.training.stores import LocalStore


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    monkeypatch.setenv("GPUFLEET_DRAIN_FILE", str(tmp_path / "drain"))
    monkeypatch.setenv("GPUFLEET_PLAN", '{"seq_len": 2048}')
    return tmp_path / "progress.json"


def train(folder: Path, steps: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with SpotTolerantRun(
        model, optimizer, dataset_size=100, global_batch=4, store=LocalStore(folder / "store"), checkpoint_every=3,
        watcher=Watcher(None, signals=False),
    ) as run:  # fmt: skip
        for _ in run.steps(steps):
            optimizer.step()


def test_a_run_writes_what_the_publisher_reads(path: Path, tmp_path: Path) -> None:
    before = time.time()
    (tmp_path / "drain.at-fault").touch()
    train(tmp_path, 5)
    assert not (tmp_path / "drain.at-fault").exists(), "its launcher went on"
    told = json.loads(path.read_text())
    assert {key: told[key] for key in ("schema_version", "step", "samples", "tokens")} == {
        "schema_version": 1, "step": 5, "samples": 20, "tokens": 20 * 2048,
    }  # fmt: skip
    assert before <= told["at"] <= time.time()
    telemetry = Telemetry(path, tmp_path / "train.log")
    assert telemetry.tokens_per_second() is None
    train(tmp_path, 7)
    later = json.loads(path.read_text())
    assert later["tokens"] == 28 * 2048
    assert telemetry.tokens_per_second() == pytest.approx(8 * 2048 / (later["at"] - told["at"]))
    assert telemetry.tokens_per_second() is None, "no new step"
    path.write_text(json.dumps({"at": later["at"] + 1, "tokens": 9}))
    assert telemetry.tokens_per_second() is None, "lost steps are no speed"


def test_the_cloudwatch_agent_gets_the_speed_and_a_long_log_loses_its_older_part(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "LOG_BYTES", 2**16)
    log = tmp_path / "train.log"
    log.write_bytes(b"a" * 2**18 + b"the end")
    telemetry = Telemetry(path, log)
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(10)
        monkeypatch.setattr(node_module, "STATSD", server.getsockname())
        telemetry.tick()
        assert log.stat().st_blocks * 512 >= 2**18, "not before a minute is over"
        for tokens in (0, 500):
            path.write_text(json.dumps({"at": 1000 + tokens / 10, "tokens": tokens}))
            monkeypatch.setattr(telemetry, "_next_at", 0.0)
            telemetry.tick()
        assert server.recv(100) == b"TokensPerSecond:10|g"
    status = log.stat()
    assert status.st_size == 2**18 + 7 and log.read_bytes().endswith(b"the end")
    assert status.st_blocks * 512 <= 2**17 or not shutil.which("fallocate")


def test_unknown_tokens_are_null(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFLEET_PLAN")
    ProgressFile(global_batch=4).update(3)
    assert json.loads(path.read_text())["tokens"] is None
    assert Telemetry(path, path).tokens_per_second() is None
    assert read_step(path) == 3


@pytest.mark.parametrize("text", ["", "3", "{}", '{"step": "many"}', "[" * 100_000])
def test_steps_of_a_file_that_other_code_writes_wrongly_are_unknown(path: Path, text: str) -> None:
    assert read_step(path) is None
    path.write_text(text)
    assert read_step(path) is None and Telemetry(path, path).tokens_per_second() is None


def test_a_file_that_cannot_be_written_stops_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUFLEET_DRAIN_FILE", str(path.parent / "absent" / "drain"))
    progress = ProgressFile(global_batch=1)
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            progress._written_at = -10.0
            progress.update(step)
    assert len(caplog.records) == 1


def test_it_is_written_once_a_second_at_most(path: Path) -> None:
    progress = ProgressFile(global_batch=1)
    progress.update(1)
    progress._written_at = time.monotonic() + 1000
    progress.update(2)
    assert json.loads(path.read_text())["step"] == 1
