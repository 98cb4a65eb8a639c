"""Two GPUs: the interrupted run ends bit-equal to the undisturbed one, and a rank keeps to its own GPU."""

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


COPY = """
import threading, torch
from bootstrap.training.stager import Stager

gpu = torch.device("cuda", 1)
torch.cuda.set_device(gpu)
weight = torch.ones(1000, device=gpu, requires_grad=True)
stager = Stager(gpu, [torch.optim.SGD([weight])])
target = torch.empty(1000, pin_memory=True)
stager.begin([(target, weight.detach())], [], [weight])
thread = threading.Thread(target=stager.finish)
thread.start()
thread.join()
print(torch._C._cuda_hasPrimaryContext(0), target.sum().item())
"""


def test_a_rank_copies_its_share_without_a_context_on_another_gpu() -> None:
    """A context takes half a gibibyte of GPU 0 for each other rank, and 0.3 s of the first save."""
    if pytest.importorskip("torch").cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    done = subprocess.run([sys.executable, "-c", COPY], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["False", "1000.0"]
