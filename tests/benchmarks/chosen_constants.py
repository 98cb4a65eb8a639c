"""Error of left-out suites with each constant neutral that was chosen with the suite's rows in view.

``python -m tests.benchmarks.chosen_constants`` refits without each suite in turn and predicts it, as *new suite* in
``tests.benchmarks.accuracy``. The error on a suite that nobody has seen lies between the shipped one and this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from optimizer.catalog.gpus import gpu_table
from optimizer.performance import collectives, kernels, step
from optimizer.performance.calibrate import fit_rows
from optimizer.performance.measured_runs import RUNS, MeasuredRun, learned_runs, log_errors, read_runs, throughput_error

# (module, constants with a value that removes their effect, or another plausible one).
NEUTRAL: Mapping[str, tuple[ModuleType, dict[str, Any]]] = {
    "none": (kernels, {}),
    "rings do not lose bandwidth with nodes": (collectives, {"NODES_AT_HALF_BANDWIDTH": 1e12}),
    "host and GPU overlap: power 2 for 2.5": (step, {"_OVERLAP_POWER": 2.0}),
    "host and GPU overlap: power 4 for 2.5": (step, {"_OVERLAP_POWER": 4.0}),
    "a tensor collective costs the host nothing (measured: 60 to 109 us)": (kernels, {"HOST_S_PER_COLLECTIVE": 0.0}),
    "a tensor collective at 60 us (for 82)": (kernels, {"HOST_S_PER_COLLECTIVE": 60e-6}),
    "embedding and head cost the host nothing": (kernels, {"END_LAYERS": 0.0}),
    "FlashAttention 1 at 0.45 of the second (for 0.55)": (kernels, {"FLASH1_OVER_FLASH2": 0.45}),
    "FlashAttention 1 at 0.70": (kernels, {"FLASH1_OVER_FLASH2": 0.7}),
    "no throttling at the power limit": (kernels, {"THROTTLING": {}}),
    "attention without dropout's arithmetic, masks as cheap as none": (
        kernels,
        {"ATTENTION_DROPOUT": (0.0, 0.0), "MASKED_ATTENTION": 1.0},
    ),
    "hosts of Llama, FSDP, DTensor, CNNs": (
        kernels,
        {
            "LLAMA_HOST": 1.0,
            "FSDP_HOST": 0.0,
            "DTENSOR_HOST": 1.0,
            "CNN_CYCLES": 0.0,
            "STEM_CYCLES": 0.0,
            "COMPILED_CNN": 1.0,
        },
    ),
}


def error_when_left_out(rows: Sequence[MeasuredRun], suite: str) -> float:
    """Mean absolute error of the throughput of ``suite`` in per cent, from a fit to the other suites."""
    fitted = fit_rows([row for row in rows if row.suite != suite])
    errors = throughput_error(log_errors([row for row in rows if row.suite == suite], fitted))
    return float(100 * np.mean(np.abs(errors)))


def main() -> None:
    """Print a table, one line a constant."""
    rows = read_runs(RUNS, gpu_table()) + learned_runs(gpu_table())
    suites = sorted({row.suite for row in rows})
    print("| neutral | " + " | ".join(suites) + " |\n|---|" + "---:|" * len(suites))
    for name, (module, values) in NEUTRAL.items():
        with ExitStack() as patched:
            for constant, value in values.items():
                patched.enter_context(patch.object(module, constant, value))
            print(f"| {name} | " + " | ".join(f"{error_when_left_out(rows, suite):.1f}" for suite in suites) + " |")


if __name__ == "__main__":
    main()
