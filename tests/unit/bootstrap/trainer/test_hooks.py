from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bootstrap.trainer.hooks import compress_gradients
from bootstrap.training.errors import ConfigurationError
from tests.warm import Warm


def test_compressed_gradients_train_and_powersgd_resumes_exactly(warm: Warm, tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    warm.torchrun(tmp_path, 2, "tests.unit.bootstrap.trainer.hooks_ranks", str(out))
    losses = json.loads(out.read_text())
    plain = losses.pop("none")
    assert plain[-1] < 0.1 * plain[0]
    for compression, values in losses.items():
        assert values[0] == plain[0] and values != plain, f"{compression} compressed nothing"
        assert values[-1] < (5 if compression == "powersgd-2" else 1.01) * plain[-1], compression


def test_layouts_without_ddp_are_refused() -> None:
    assert compress_gradients(torch.nn.Linear(1, 1), "none", precision="bf16", steps=100) == {}
    with pytest.raises(ConfigurationError, match="is a hook of DistributedDataParallel, and this layout"):
        compress_gradients(torch.nn.Linear(1, 1), "bf16", precision="bf16", steps=100)
