"""The smoke test on real GPUs with NCCL: ``pytest -m gpu tests/gpu/test_smoke_gpu.py`` (a minute or two)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootstrap.processes import descendants

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
COMMAND = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu",
    "-m", "bootstrap.smoke", "--device", "cuda",
)  # fmt: skip


def smoke() -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [*COMMAND, "--time-limit-s", "240"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_all_gpus_of_this_machine_pass() -> None:
    code, report, told = smoke()
    assert code == 0, told
    assert report["passed"]
    assert report["world_size"] == torch.cuda.device_count()
    assert report["software"]["nccl"]
    assert all(rank["name"] for rank in report["ranks"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_floor_beyond_the_hardware_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    band = {"value": 1e5, "warn_below": 1e5, "fail_below": 1e5}
    monkeypatch.setenv("GPUFLEET_PLAN", json.dumps({"expected": {"link_gb_per_s": band}}))
    code, report, _ = smoke()
    assert code == 1
    assert not report["passed"]
    assert report["error"] is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_dies_does_not_hang_nccl() -> None:
    command = [*COMMAND, "--time-limit-s", "120"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "all_reduce" in line)
        os.kill(descendants(process.pid)[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=140)
    assert process.returncode == 1 and "exitcode  : -9" in errors
