"""Trainings that Nsight Systems may trace: by a stand-in that does what nsys was measured to do, and by nsys itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.contract.trace import REQUEST, TraceRequest
from bootstrap.training.ledger.summary import read_ledger
from bootstrap.training.stores import LocalStore
from examples.interrupted_training import Node
from tests.training.conftest import STEPS, Outcome, outcome_of

pytestmark = pytest.mark.training

STAND_IN = Path(__file__).with_name("stand_in_nsys.py")
REAL = shutil.which("nsys")


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no nsys on PATH: NVIDIA's Nsight Systems")),
    ]
)
def nsys(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "real":
        assert REAL is not None
        return REAL
    program = tmp_path / "bin/nsys"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def node(nsys: str, make_node: Callable[..., Node], tmp_path: Path) -> Node:
    # Forks (tests/warm.py) would begin without the variables.
    made = make_node(is_real=True, step_delay_s=0.25)
    (tmp_path / "tmp").mkdir()
    made.environment |= {
        "GPUFLEET_NSIGHT": "1", "PATH": f"{Path(nsys).parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp"),
    }  # fmt: skip
    return made


def traced(nsys: str, report: bytes, folder: Path) -> set[int]:
    """Processes of a report."""
    if nsys != REAL:
        return set(json.loads(report))
    (folder / "report.nsys-rep").write_bytes(report)
    words = [nsys, "export", "--type=sqlite", f"--output={folder}/report.sqlite", f"{folder}/report.nsys-rep"]
    subprocess.run(words, check=True)
    # https://docs.nvidia.com/nsight-systems/UserGuide/index.html: bits 24 to 47 of globalTid are the process.
    found = sqlite3.connect(folder / "report.sqlite").execute("SELECT (globalTid >> 24) & 0xffffff FROM OSRT_API")
    return {pid for (pid,) in found}


def processes(*words: str) -> list[int]:
    """Processes whose command line has all words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], object], node: Node) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, node.log_tail()
        time.sleep(0.05)


def test_a_capture_lands_in_the_store_and_neither_a_stop_nor_a_dead_session_loses_a_step(
    node: Node, nsys: str, undisturbed: Outcome, tmp_path: Path
) -> None:
    """SIGTERM to the agent, as systemd sends it; then the session's daemon dies, and torchrun starts without it."""
    store = LocalStore(node.store)
    request = TraceRequest(id="first", rank=1, steps=1, at=datetime.now(UTC), by="ada", nsight_s=1)
    store.write(REQUEST, [request.to_text().encode()])
    with node.running() as process:
        # The copy has another name until it is whole.
        wait_for(lambda: store.names("traces/first/") == [request.trace], node)
        workers = {node.worker_pid(rank) for rank in range(2)}
        assert workers <= traced(nsys, store.read(request.trace), tmp_path)
        process.terminate()
        node.wait(process)
        stopped_at = node.steps_done()
    assert 1 <= stopped_at < STEPS
    wait_for(lambda: not processes("--start-agent", f"--session-name=gpufleet-{process.pid}"), node)
    with node.running() as process:
        node.wait_for_step(stopped_at + 1, process)
        (daemon,) = processes("--start-agent", f"--session-name=gpufleet-{process.pid}")
        os.kill(daemon, signal.SIGKILL)
        node.wait(process)
    assert outcome_of(node) == undisturbed
    log = node.log.read_text()
    # With the session's variables a new process would fail.
    assert "starting torchrun again without it" in log and "by SIGTERM, saved" in log
    assert read_ledger(str(node.store)).lost_steps == 0


def test_an_exit_status_stays_what_it_is(node: Node, tmp_path: Path) -> None:
    (tmp_path / "fault.py").write_text(f"raise SystemExit({EXIT_AT_FAULT})\n")
    node.environment["GPUFLEET_TRAIN_COMMAND"] = str(tmp_path / "fault.py")
    with node.running() as process:
        assert process.wait(timeout=120) == EXIT_AT_FAULT
    log = node.log.read_text()
    assert f"session gpufleet-{process.pid}" in log and "its settings are at fault" in log
