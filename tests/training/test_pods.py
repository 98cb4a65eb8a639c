"""Two pods of a manifest on this machine: the agent with the container's variables, real torchrun, real rendezvous.

Cluster DNS is a file, and the node's gpufleet-node.service is this test, which writes the drain file.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bootstrap.training.ledger.summary import read_ledger
from examples.interrupted_training import LIMIT_S, Node
from examples.local_imds import LocalImds
from infra.kubernetes.manifests import manifests
from infra.kubernetes.pod import LEFT
from tests.infra.test_manifests import IMAGE, facts
from tests.plans import sample_plan
from tests.training.conftest import STEPS, Outcome, WarmNode, outcome_of
from tests.warm import Warm

pytestmark = pytest.mark.training
# Answers for the names in $DNS, as cluster DNS does for pods that have an address.
FAKE_GETENT = '#!/usr/bin/env bash\ngrep --quiet --line-regexp "$2" "$DNS" && echo "127.0.0.1 STREAM $2"\n'
# Variables that a container on this machine must set itself.
LOCAL = {
    "GPUFLEET_TRAIN_COMMAND", "GPUFLEET_NODE_COUNT", "GPUFLEET_GPUS_PER_NODE", "GPUFLEET_PYTHON", "GPUFLEET_TRAIN_DIR",
    "GPUFLEET_RUN_DIR", "GPUFLEET_CHECKPOINT_URI", "GPUFLEET_BUCKET", "GPUFLEET_EFA_CARDS", "GPUFLEET_PROGRESS_FILE",
}  # fmt: skip


def container() -> dict[str, Any]:
    plan = sample_plan()
    job = manifests(plan, facts(plan), image=IMAGE)[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
    first: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return first


class Gang:
    """Two pods of one worker each, sharing a store."""

    def __init__(self, warm: Warm, folder: Path) -> None:
        self.warm, self.folder, self.dns = warm, folder, folder / "dns"
        self.dns.touch()
        (folder / "bin").mkdir()
        (folder / "bin/getent").write_text(FAKE_GETENT)
        (folder / "bin/getent").chmod(0o755)
        self.variables = {entry["name"]: entry["value"] for entry in container()["env"] if "value" in entry}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def run_dir(self, rank: int) -> Path:
        return self.folder / f"run-{rank}"

    @contextmanager
    def pod(self, rank: int) -> Iterator[Node]:
        """One pod; it has an address as soon as it is here."""
        with LocalImds().running() as imds:
            node = WarmNode(self.warm, self.folder / "shared", imds, steps=STEPS, step_delay_s=0.1, workers=1)
            node.log = self.folder / f"pod-{rank}.log"
            node.environment |= {name: value for name, value in self.variables.items() if name not in LOCAL}
            node.environment |= {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "DNS": str(self.dns),
                "OMP_NUM_THREADS": "1",
                "GPUFLEET_NODE_COUNT": "2",
                "GPUFLEET_NODE_RANK": str(rank),
                "GPUFLEET_RUN_DIR": str(self.run_dir(rank)),
                "GPUFLEET_RENDEZVOUS_PORT": str(self.port),
                "GPUFLEET_JOIN_POLL_S": "0.5",
            }
            with self.dns.open("a") as names:
                names.write(self.variables["GPUFLEET_PEERS"] % rank + "\n")
            yield node

    def node_leaves(self, rank: int) -> None:
        """Write the drain file as serve.sh does."""
        (self.run_dir(rank) / "drain").write_text(f"{int(time.time()) + 60} spot/instance-action (terminate at once)\n")


def test_a_pod_whose_node_leaves_saves_ends_as_left_and_is_followed_by_another(
    tmp_path: Path, warm: Warm, undisturbed: Outcome
) -> None:
    gang = Gang(warm, tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(gang.pod(0))
        first_process = stack.enter_context(first.running())
        deadline = time.monotonic() + LIMIT_S
        while "1 of 2 pods have an address" not in first.log.read_text():
            assert first_process.poll() is None and time.monotonic() < deadline, first.log_tail()
            time.sleep(0.1)
        second = stack.enter_context(gang.pod(1))
        second_process = stack.enter_context(second.running())
        first.wait_for_step(8, first_process)
        gang.node_leaves(1)
        # Kubernetes makes another pod of the same rank for this status, and counts no failure (podFailurePolicy).
        assert second_process.wait(timeout=LIMIT_S) == LEFT
        assert "state is saved" in second.log.read_text()
        again = stack.enter_context(gang.pod(1))
        again_process = stack.enter_context(again.running())
        first.wait(first_process)
        again.wait(again_process)
    assert outcome_of(first) == undisturbed
    summary = read_ledger(str(first.store))
    assert (summary.lost_steps, summary.steps, summary.finished) == (0, STEPS, True)
    # gpufleet-node.service passes it on to the controller.
    assert (gang.run_dir(0) / "state").read_text() == (gang.run_dir(1) / "state").read_text() == "done 0\n"
