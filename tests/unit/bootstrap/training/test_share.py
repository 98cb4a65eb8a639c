"""Shares of a checkpoint: evenly divided, known before the first step, within the node's memory; when ranks agree."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bootstrap.training import SpotTolerantRun, host_buffer
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.host_buffer import make_kept, refuse_too_large
from bootstrap.training.planning import PIECE_BYTES, Planner, pieces_of
from bootstrap.training.rank_group import Agreement, RankGroup
from bootstrap.training.state import TrainingState
from bootstrap.training.tensors import Geometry, put_together, take_apart


def replicated(*shape: int, replicas: int = 4) -> Geometry:
    return Geometry(shape=shape, dtype=torch.float32, offsets=(0,) * len(shape), sizes=shape, replicas=replicas)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 10**8), (32000, 2048), (2048,), (3, 3), (10**7,), (70_000, 1024)])
def test_pieces_cover_a_tensor_once(shape: tuple[int, ...]) -> None:
    pieces = pieces_of(replicated(*shape))
    assert sum(math.prod(piece.sizes) for piece in pieces) == math.prod(shape)
    rows = (
        [row for piece in pieces for row in range(piece.offsets[0], piece.offsets[0] + piece.sizes[0])] if shape else []
    )
    assert rows == list(range(shape[0] if shape else 0))
    assert len(pieces) == 1 or all(math.prod(piece.sizes) * 4 <= PIECE_BYTES for piece in pieces)


def test_replicas_are_divided_evenly() -> None:
    """A Llama of 1.2e9 parameters with AdamW over four ranks: the fullest rank has at most 3% more than a quarter."""
    layer = {"q": (2048, 2048), "k": (2048, 2048), "up": (5504, 2048), "down": (2048, 5504), "norm": (2048,)}
    shapes = {f"{number}.{name}": shape for number in range(22) for name, shape in layer.items()}
    shapes |= {"embedding": (32000, 2048), "head": (32000, 2048)}
    geometries = {f"{part}.{name}": replicated(*shape) for part in "pmv" for name, shape in shapes.items()}
    planners = [Planner(geometries) for _ in range(4)]
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    sizes = [sum(math.prod(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data) for plan in plans]
    assert sum(sizes) == 3 * sum(math.prod(shape) for shape in shapes.values())
    assert max(sizes) <= 1.03 * sum(sizes) / 4
    assert metadata.state_dict_metadata.keys() == geometries.keys()


class Shrinking(torch.optim.SGD):
    """Changes parameters even with a learning rate of 0, and draws random numbers; has a setting beside its groups."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.share, self.native = 0.9, SimpleNamespace(is_open=True)

    def __del__(self) -> None:
        self.native.is_open = False  # as DeepSpeedCPUAdam

    def step(self, closure: Any = None) -> Any:
        assert self.native.is_open
        for group in self.param_groups:
            group["lr"] *= 0.5
            for parameter in group["params"]:
                parameter.data.mul_(self.share)
                self.state[parameter] = {
                    "noise": torch.rand(parameter.shape[0], 2),
                    "count": 3,
                    "mean": torch.rand(5000),
                }


@pytest.mark.parametrize("make", [torch.optim.AdamW, Shrinking, torch.optim.Adafactor])
def test_states_are_known_before_the_first_step_and_nothing_changes(make: Callable[..., Any]) -> None:
    model = nn.Linear(1500, 40)
    optimizer = make(model.parameters(), lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    state = TrainingState(model, optimizer, {"schedule": schedule})
    expected = state.expected()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1)
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(2, 1500)).sum().backward()
    optimizer.step()
    snapshot = state.snapshot()
    assert state.geometries({**snapshot.later, **snapshot.now}) == expected


def test_nested_states_come_back_as_they_were() -> None:
    value = {"a": [torch.ones(3), (torch.arange(5000), 2.5)], 3: {"scalar": torch.tensor(7)}, "none": None}
    tensors: dict[str, torch.Tensor] = {}
    skeleton = take_apart(value, "part", tensors)
    assert list(tensors) == ["part.a.1.0"]
    again = put_together(skeleton, tensors.__getitem__)
    assert again["a"][1][0] is tensors["part.a.1.0"] and again["a"][1][1] == 2.5 and again["none"] is None
    assert torch.equal(again["a"][0], torch.ones(3)) and again[3]["scalar"] == 7
    # SOAP's eigenvectors are transposed: products of contiguous ones differ in the last bits.
    turned = put_together(take_apart(torch.ones(70, 80).t(), "turned", tensors), lambda _: torch.ones(80, 70))
    assert turned.stride() == tensors["turned"].stride() == (1, 80)


def test_too_little_host_memory_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_too_large(2**20, local_ranks=8, other_bytes=0)
    for name, text in (("memory.max", f"{12 * 2**30}"), ("memory.current", f"{9 * 2**30}"),
                       ("memory.stat", f"anon {7 * 2**30}\nactive_file {2**30}\ninactive_file {2**30}\n")):  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_buffer, "CGROUP", tmp_path)
    refuse_too_large(2**28, local_ranks=8, other_bytes=0)
    with pytest.raises(
        ConfigurationError, match=r"need 8\.0 GiB .*8 ranks × 0\.5 GiB.*0\.5 GiB for.*5\.0 GiB are free"
    ):
        refuse_too_large(2**29, local_ranks=8, other_bytes=2**29)
    refuse_too_large(2**29, local_ranks=8, other_bytes=2**29, held=6 * 2**30)


def test_the_memory_that_torchrun_keeps_grows_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as in conda's Python
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv("LOCAL_RANK", "7")
    kept = make_kept("7")
    model = nn.Linear(30, 30)
    options: dict[str, Any] = {"dataset_size": 8, "global_batch": 1, "store": str(tmp_path), "checkpoint_every": 1}
    with SpotTolerantRun(model, torch.optim.SGD(model.parameters()), **options) as run:
        for step in run.steps(2):
            if step == 1:
                model.register_buffer("queue", torch.zeros(100_000))
    assert os.fstat(kept).st_size >= 400_000 and len(host_buffer._maps) == 1
    os.close(kept)


class TwoRanks(RankGroup):
    """Two ranks whose slower one takes ``step_ms`` a step."""

    def __init__(self, step_ms: int) -> None:
        super().__init__(timeout_s=1)
        self.world_size, self.step_ms, self.exchanges = 2, step_ms, 0

    def maximum(self, *values: int) -> list[int]:
        self.exchanges += 1
        return [*values[:-1], self.step_ms]


@pytest.mark.parametrize(("step_ms", "every", "saving", "exchanges", "seen"), [
    (100, None, False, (4, 5), 10), (1, None, False, (4, 5), 10), (300, None, False, (13, 16), 3),
    (999, None, False, (40, 40), 1), (2000, None, False, (40, 40), 0), (100, None, True, (20, 22), 2),
    (1, 1, False, (40, 40), 1), (100, 8, False, (5, 6), 8),
])  # fmt: skip
def test_ranks_agree_about_once_a_second_and_four_times_while_a_checkpoint_is_pending(
    step_ms: int, every: int | None, saving: bool, exchanges: tuple[int, int], seen: int
) -> None:
    """Exchanges in 40 steps, and steps until a notice is acted on."""
    ranks, noticed, acted = TwoRanks(step_ms), 21, None
    flags = [0]
    agreement = Agreement(ranks, lambda: (flags[0],), every, saving=lambda: saving)
    for step in range(1, 41):
        flags[0] = int(step >= noticed)
        agreed = agreement.exchange(now=False)
        if agreed is not None and agreed[0] and acted is None:
            acted = step
    assert exchanges[0] <= ranks.exchanges <= exchanges[1]
    assert acted is not None and acted - noticed <= seen + 1
