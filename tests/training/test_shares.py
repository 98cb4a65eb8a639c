"""Unequal shares of the global batch, one torchrun of three ranks: samples, losses, parameters as with equal ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.training.test_trainer import LLAMA, torchrun
from tests.warm import Warm

RANKS, STEPS = 3, 26


@pytest.mark.timeout(300)
def test_unequal_shares_train_the_same(warm: Warm, tmp_path: Path) -> None:
    """Each phase resumes from the one before; the second measures the shares, the last has equal ones again."""
    common = [
        "--architecture", json.dumps(LLAMA), "--seq-len", "16", "--global-batch", "12", "--precision", "fp32",
        "--schedule", "constant", "--log-every", "1", "--gpus-per-node", str(RANKS), "--evaluate-every", "4",
        "--evaluation-steps", "1",
    ]  # fmt: skip
    phases: list[tuple[str, str, int | None]] = [
        ("equal", f"--micro-batch 4 --steps {STEPS}", None),
        ("unequal", "--sharding zero3 --steps 4", None),
        ("unequal", "--sharding zero1 --steps 22 --balance measured", 2),
        ("unequal", f"--steps {STEPS} --micro-batch 4", None),
    ]
    (tmp_path / "phases.json").write_text(
        json.dumps(
            [
                {
                    "flags": [*common, *more.split(), "--out", out],
                    "checkpoints": f"{out}/checkpoints",
                    "slow_rank": slow,
                }
                for out, more, slow in phases
            ]
        )
    )
    log = torchrun(warm, tmp_path, RANKS, "tests.training.shares_ranks", "phases.json", "out.json")
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    equal, unequal = (metrics(tmp_path / out) for out in ("equal", "unequal"))
    assert sorted(equal["loss"]) == sorted(unequal["loss"]) == list(range(1, STEPS + 1))
    for name in ("loss", "gradient_norm", "evaluation_loss"):
        assert unequal[name] == pytest.approx(equal[name], rel=1e-5), name
    weights, others = (
        load_file(tmp_path / out / "checkpoints/weights/model.safetensors") for out in ("equal", "unequal")
    )
    for name, tensor in weights.items():
        assert float((tensor - others[name]).abs().max()) < 1e-5, name

    # 60 ms a micro-batch against at most 25 on a busy machine: the slowed rank keeps one or two of twelve.
    match = re.search(r"by data rank are now \[(\d+), (\d+), (\d+)\], before 4 each", log)
    assert match, log[-3000:]
    passes = [int(number) for number in match.groups()]
    assert sum(passes) == 12 and passes[2] <= 2 and min(passes) >= 1

    loops = found["loops"]
    assert loops["unequal"]["parameters"] == pytest.approx(loops["equal"]["parameters"], abs=1e-5)
    assert "(2, 1, 3) on rank 0 and (1, 2, 3) on rank 1" in found["errors"][0]


def metrics(out: Path) -> dict[str, dict[int, float]]:
    """Values by name and step."""
    values: dict[str, dict[int, float]] = {"loss": {}, "gradient_norm": {}, "evaluation_loss": {}}
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        for name in values.keys() & facts.keys():
            values[name][facts["step"]] = facts[name]
    return values
