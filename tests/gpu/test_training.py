"""The interrupted run on two GPUs with NCCL ends bit-equal to the undisturbed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.training]
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_interrupted_run_on_gpus_equals_the_undisturbed_one() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "examples.interrupted_training", "--gpus"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=590)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "100 of 100 steps equal" in outcome.stdout
