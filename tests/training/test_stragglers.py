"""The rank that all others wait for is named while training, by real torchrun of four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.test_trainer import torchrun
from tests.warm import Warm


@pytest.mark.training
@pytest.mark.timeout(300)
def test_a_slowed_rank_is_named_and_equal_ranks_are_not(warm: Warm, tmp_path: Path) -> None:
    log = torchrun(warm, tmp_path, 4, "tests.training.straggler_ranks", "out.json")
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    # A slowed rank takes many times as long; on a busy machine equal ones scatter by more than the share that is named.
    named = {phase: (slowest["rank"], slowest["part"]) for phase, slowest in found.items() if slowest["slower"] > 0.5}
    assert named == {
        "replicated": (2, "compute"), "sharded": (3, "compute"), "input": (1, "input"),
    }, (found, log[-3000:])  # fmt: skip
    assert "slower than the median rank" in log
