"""A module's training beside processes of a user's: ``python -m tests.benchmarks.with_processes MODULE ARGUMENTS``.

A daemon and a subprocess live as long as the rank may; every tenth step makes, uses and ends a pool.
"""

from __future__ import annotations

import multiprocessing
import runpy
import subprocess
import sys
import time
from typing import Any

import torch

from bootstrap.training import SpotTolerantRun

PLAIN: Any = SpotTolerantRun.sample_indices


def sample_indices(run: SpotTolerantRun, step: int) -> torch.Tensor:
    if step % 10 == 0:
        with multiprocessing.Pool(1) as pool:
            assert pool.map(abs, [-1, 1]) == [1, 1]
    indices: torch.Tensor = PLAIN(run, step)
    return indices


if __name__ == "__main__":
    multiprocessing.Process(target=time.sleep, args=(10**6,), daemon=True).start()
    subprocess.Popen(["sleep", "1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    SpotTolerantRun.sample_indices = sample_indices  # type: ignore[assignment, method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
