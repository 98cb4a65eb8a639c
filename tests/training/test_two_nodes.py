"""Two nodes on this machine: each its own agent, metadata service and torchrun, joined by a real rendezvous.

Only the AWS CLI is a fake: it says which instances the fleet has, as a file tells it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bootstrap.training.ledger import read_ledger
from examples.interrupted_training import Node
from examples.local_imds import LocalImds
from tests.training.conftest import STEPS, Outcome, WarmNode, outcome_of
from tests.warm import Warm

pytestmark = pytest.mark.training
FAKE_AWS = """#!/usr/bin/env bash
case "$*" in
  *describe-auto-scaling-groups*) cut -f 2 "$FLEET" ;;
  *describe-instances*) cat "$FLEET" ;;
  *complete-lifecycle-action*) echo "$*" >>"$FLEET.completed" ;;
esac
"""


class Fleet:
    """A fleet of two nodes with one worker each, sharing a store."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.folder = warm, folder
        self.members = folder / "fleet"
        (folder / "bin").mkdir()
        (folder / "bin" / "aws").write_text(FAKE_AWS)
        (folder / "bin" / "aws").chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def set_members(self, *ids: str) -> None:
        """Instances in service, the oldest first."""
        lines = [f"2026-01-01T0{index}:00:00+00:00\t{one}\t127.0.0.1\n" for index, one in enumerate(ids)]
        self.members.write_text("".join(lines))

    @contextmanager
    def node(self, instance_id: str) -> Iterator[tuple[Node, LocalImds]]:
        with LocalImds().running() as imds:
            imds.values["instance-id"] = instance_id
            node = WarmNode(self.warm, self.folder / "shared", imds, steps=STEPS, step_delay_s=0.1, workers=1)
            node.log = self.folder / f"{instance_id}.log"
            node.environment |= {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "FLEET": str(self.members),
                "GPUFLEET_NODE_COUNT": "2",
                # torchrun sets it for more than one worker a node, and sums depend on the number of threads.
                "OMP_NUM_THREADS": "1",
                "GPUFLEET_ASG_NAME": "fleet-1",
                "GPUFLEET_REGION": "us-east-1",
                "GPUFLEET_TERMINATE_HOOK": "drain",
                "GPUFLEET_RUN_DIR": str(self.folder / f"run-{instance_id}"),
                # No gang test: ranks of a busy machine are not equally fast (tests/unit/bootstrap/smoke/test_gang.py).
                "GPUFLEET_AGENT": json.dumps({"rendezvous_port": self.port, "join_poll_s": 0.5, "gang_test_s": 0}),
            }
            yield node, imds


def end(node: Node, imds: LocalImds, process: subprocess.Popen[bytes]) -> None:
    """A node that is done stays until the group ends it, and then leaves at once."""
    deadline = time.monotonic() + 120
    while "training is complete" not in node.log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, node.log_tail()
        time.sleep(0.1)
    imds.values["autoscaling/target-lifecycle-state"] = "Terminated"
    node.wait(process)


def test_an_interrupted_node_is_replaced_and_the_other_stays(tmp_path: Path, warm: Warm, undisturbed: Outcome) -> None:
    fleet = Fleet(warm, tmp_path)
    fleet.set_members("i-0000000000000000b", "i-0000000000000000c")
    with ExitStack() as stack:
        host, host_imds = stack.enter_context(fleet.node("i-0000000000000000b"))
        guest, guest_imds = stack.enter_context(fleet.node("i-0000000000000000c"))
        host_process = stack.enter_context(host.running())
        guest_process = stack.enter_context(guest.running())
        host.wait_for_step(8, host_process)
        guest_imds.interrupt()
        guest.wait(guest_process)
        stopped_at = host.steps_done()
        assert 8 <= stopped_at < STEPS and host_process.poll() is None
        assert "i-0000000000000000c" in Path(f"{fleet.members}.completed").read_text()

        # The replacement has the lowest id and is the youngest: it must join where the host waits.
        time.sleep(1.0)
        fleet.set_members("i-0000000000000000b", "i-0000000000000000a")
        replacement, replacement_imds = stack.enter_context(fleet.node("i-0000000000000000a"))
        replacement_process = stack.enter_context(replacement.running())
        for node, imds, process in (
            (host, host_imds, host_process),
            (replacement, replacement_imds, replacement_process),
        ):
            end(node, imds, process)
    completed = Path(f"{fleet.members}.completed").read_text()
    assert all(completed.count(f"i-0000000000000000{one}") == 1 for one in "abc"), completed
    assert outcome_of(host) == undisturbed
    summary = read_ledger(str(host.store))
    assert (summary.lost_steps, summary.steps, summary.finished) == (0, STEPS, True)
    # One launch of the host all along: its torchrun survived the loss of its peer.
    assert host.log.read_text().count("starting torchrun") == 1
