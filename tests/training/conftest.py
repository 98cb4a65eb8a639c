"""Real agent, torchrun and workers on this machine's CPUs, and one undisturbed run to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.interrupted_training import Node
from examples.local_imds import LocalImds

STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Losses and final parameters of a run."""

    losses: dict[int, float]
    parameters_sha256: str


def outcome_of(node: Node) -> Outcome:
    return Outcome(losses=node.losses(), parameters_sha256=node.parameters_sha256())


def undisturbed_run(folder: Path, sharding: str) -> Outcome:
    with LocalImds().running() as imds:
        node = Node(folder, imds, steps=STEPS, step_delay_s=0.0, sharding=sharding)
        with node.running() as process:
            node.wait(process)
        return outcome_of(node)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), "ddp")


@pytest.fixture(scope="session")
def undisturbed_sharded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), "fsdp2")


@pytest.fixture
def imds() -> Iterator[LocalImds]:
    with LocalImds().running() as service:
        yield service


@pytest.fixture
def make_node(tmp_path: Path, imds: LocalImds) -> Callable[..., Node]:
    def make(*, workers: int = 2, step_delay_s: float = 0.1, sharding: str = "ddp") -> Node:
        folder = tmp_path / "node"
        return Node(folder, imds, steps=STEPS, step_delay_s=step_delay_s, workers=workers, sharding=sharding)

    return make


def alive(pid: int) -> bool:
    """True while a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
