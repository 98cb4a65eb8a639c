from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import nn

from bootstrap.training import stragglers
from bootstrap.training.stragglers import Stragglers


class Ranks:
    """Group whose ranks have given parts of a step, s."""

    def __init__(self, *parts: tuple[float, float]) -> None:
        self.parts = parts

    def gather_to_first(self, mine: tuple[str, list[float]]) -> list[Any]:
        return [(f"i-{rank}", list(parts)) for rank, parts in enumerate(self.parts)]


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (((0, 1.0), (0, 1.02), (0, 1.2), (0, 0.98)), (2, "compute", 0.2)),
        (((0, 1.0), (0, 1.12)), (1, "compute", 0.12)),  # of two ranks, against the faster
        (((0, 1.0), (0.15, 1.0), (0, 1.0)), (1, "input", 0.15)),
        (((0, 0.0), (0, 0.0), (0, 0.0)), (0, "compute", 0.0)),  # a compiled model: nothing is timed
    ],
)
def test_ranks_are_compared_with_the_median(
    parts: Any, named: tuple[int, str, float], caplog: pytest.LogCaptureFixture
) -> None:
    watch = Stragglers()
    assert watch.compare(Ranks(*parts)) is None  # type: ignore[arg-type]
    watch._since, watch._steps = time.monotonic() - 1000, 1000  # steps of a second
    found = watch.compare(Ranks(*parts))  # type: ignore[arg-type]
    assert found is not None
    rank, part, slower = named
    assert (found.rank, found.host, found.part) == (rank, f"i-{rank}", part)
    assert found.slower == pytest.approx(slower, abs=0.01)
    assert ("slower than the median rank" in caplog.text) == (found.slower > 0.1)


def test_only_training_passes_are_timed_and_copies_carry_no_clock() -> None:
    model = nn.Linear(2, 2)
    watch = Stragglers()
    watch.watch(model, torch.device("cpu"))
    for passes in range(2):
        watch.begin_step()
        for _ in range(passes):
            model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))
    assert [part for part, _, _ in watch._spans] == [stragglers.INPUT, stragglers.FORWARD]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
        other.train()(torch.ones(1, 2))
    assert len(watch._spans) == 2
    watch.close()
    assert not model._forward_pre_hooks and not model._forward_hooks
