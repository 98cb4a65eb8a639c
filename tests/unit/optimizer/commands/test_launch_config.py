"""``gpufleet launch-config``: where the configuration and the launch lines go, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet


def test_a_file_and_the_lines_that_start_it(gpufleet: Gpufleet, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "my_run.py"
    plan.write_text(sample_plan().to_json(), encoding="utf-8")
    code, printed, notes = gpufleet("launch-config", str(plan), "--engine", "torchtitan", "--out", str(out))
    line = "pulumi config set gpufleet:trainCommand -- '-m torchtitan.train --module my_run --config plan'"
    assert (code, printed) == (0, "") and line in notes and line in out.read_text(encoding="utf-8")
    assert "export HF_MODEL" in notes, "this plan has no model config"


def test_json_is_only_json_on_standard_output(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(sample_plan().to_json()))
    code, printed, notes = gpufleet("launch-config", "-", "--engine", "deepspeed")
    assert code == 0 and json.loads(printed)["train_batch_size"] == 128 and "train.py --deepspeed" in notes
