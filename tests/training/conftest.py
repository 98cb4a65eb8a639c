"""Real agent, torchrun and workers on this machine's CPUs, and undisturbed runs to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from examples.interrupted_training import Node
from examples.local_imds import LocalImds
from tests.warm import Warm

STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Losses and final parameters of a run."""

    losses: dict[int, float]
    parameters_sha256: str


def outcome_of(node: Node) -> Outcome:
    return Outcome(losses=node.losses(), parameters_sha256=node.parameters_sha256())


class WarmNode(Node):
    """Node whose processes are forks (tests/warm.py)."""

    def __init__(self, warm: Warm, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._warm = warm

    def start(self, arguments: Sequence[str], log: IO[bytes]) -> Any:
        return self._warm.start(arguments, env=self.environment, output=log)


@pytest.fixture(scope="session")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    with LocalImds().running() as imds:
        node = WarmNode(warm, folder, imds, steps=STEPS, step_delay_s=0.0, sharding="ddp")
        with node.running() as process:
            node.wait(process)
        return outcome_of(node)


@pytest.fixture
def imds() -> Iterator[LocalImds]:
    with LocalImds().running() as service:
        yield service


@pytest.fixture
def make_node(warm: Warm, tmp_path: Path, imds: LocalImds) -> Callable[..., Node]:
    def make(*, is_real: bool = False, step_delay_s: float = 0.125, sharding: str = "ddp", **options: Any) -> Node:
        make_one: Callable[..., Node] = Node if is_real else partial(WarmNode, warm)
        return make_one(tmp_path / "node", imds, steps=STEPS, step_delay_s=step_delay_s, sharding=sharding, **options)

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
