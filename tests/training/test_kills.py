"""Real torchrun runs, killed, stopped and hung in every way that a spot fleet knows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bootstrap.training.errors import EXIT_HUNG
from bootstrap.training.ledger import read_ledger
from examples.interrupted_training import Node
from tests.training.conftest import STEPS, Outcome, alive, outcome_of, parent_of

pytestmark = pytest.mark.training


def gone_within(pids: list[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def pids_of(node: Node) -> set[str]:
    return {path.read_text() for path in node.out.glob("rank-*.pid")}


def test_sigkill_at_random_steps_ends_bit_equal(make_node: Callable[..., Node], undisturbed: Outcome) -> None:
    """Two kills of a random victim at random steps; torchrun or the agent starts the run again by itself.

    The demonstration (test_demo.py) kills ranks and nodes of FSDP2.
    """
    dice = random.Random(11)  # noqa: S311 - not for secrets
    node = make_node()
    with node.running() as process:
        for first, last in ((2, 18), (22, 36)):
            node.wait_for_step(dice.randint(first, last), process)
            before = pids_of(node)
            worker = node.worker_pid(dice.randrange(2))
            os.kill(dice.choice([worker, parent_of(worker)]), signal.SIGKILL)
            assert gone_within([worker], 40)
            # Orphans may have trained on for a moment: what comes next must be about the new workers.
            deadline = time.monotonic() + 120
            while pids_of(node) & before and time.monotonic() < deadline:
                time.sleep(0.05)
        node.wait(process)
    assert outcome_of(node) == undisturbed
    summary = read_ledger(str(node.store))
    # A process killed during its imports never got to the ledger.
    assert summary.starts in (2, 3) and summary.steps == STEPS and summary.finished
    assert sum(summary.seconds.values()) == pytest.approx(summary.wall_seconds, abs=0.01)


def test_an_orphan_ends_though_nobody_reads_its_output() -> None:
    program = "import time; from bootstrap.training.leaving import Heartbeat; h = Heartbeat(); h._torchrun_pid = 1; "
    program += "h.beat(limit_s=1, doing='a step'); time.sleep(60)"
    read_end, write_end = os.pipe()
    os.close(read_end)
    orphan = subprocess.run([sys.executable, "-c", program], stderr=write_end, timeout=30, check=False)
    os.close(write_end)
    assert orphan.returncode == EXIT_HUNG


def test_sigterm_to_torchrun_saves_within_its_30_seconds(make_node: Callable[..., Node]) -> None:
    node = make_node()
    with node.running() as process:
        node.wait_for_step(7, process)
        workers = [node.worker_pid(rank) for rank in range(2)]
        os.kill(parent_of(workers[0]), signal.SIGTERM)
        assert gone_within(workers, 20.0)
        deadline = time.monotonic() + 60
        while "by SIGTERM, saved" not in node.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "by SIGTERM, saved" in node.log.read_text()


def test_hung_peer_does_not_hang_the_others(make_node: Callable[..., Node]) -> None:
    """A stopped process keeps its sockets open, so nothing but the heartbeat can tell."""
    node = make_node()
    node.environment["GPUFLEET_HANG_TIMEOUT_S"] = "3"
    with node.running() as process:
        node.wait_for_step(3, process)
        waiting, hung = node.worker_pid(0), node.worker_pid(1)
        os.kill(hung, signal.SIGSTOP)
        # Twice the limit: the beat before the stop may be as old as one step.
        assert gone_within([waiting], 8.0)
        os.kill(hung, signal.SIGKILL)
        # The agent may still be reading the worker's last lines when the worker is gone.
        words, until = ("rank 0: no progress for 3 s", "Thread 0x", "run.goes_on()"), time.monotonic() + 20
        while not all(word in node.log.read_text() for word in words) and time.monotonic() < until:
            time.sleep(0.1)
    text = node.log.read_text()
    assert all(word in text for word in words), text
