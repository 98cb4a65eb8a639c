"""The estimate on 1 to 32 nodes, each model judged by a fit that saw none of its runs."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.calibration import BY_PROCESSOR
from optimizer.performance.fit import adapt
from tests.benchmarks.many_nodes import Judged, left_out, runs, without
from tests.unit.optimizer.performance.fixtures import CALIBRATION
from tools.calibration import MANY_NODES, read_runs


@functools.cache
def judged() -> dict[str, tuple[Judged, Judged]]:
    return left_out(runs())


@pytest.mark.parametrize("model", ["llama-1B", "llama-8B"])
def test_a_model_left_out_is_met_on_many_nodes(model: str) -> None:
    undisturbed, every = judged()[model]
    assert undisturbed.best_tenth_error < 0.10
    assert abs(undisturbed.best_tenth_bias) < 0.06
    assert undisturbed.median_error < 0.15
    speeds = list(undisturbed.preferred.values())
    assert math.exp(np.mean(np.log(speeds))) > 0.93
    assert undisturbed.within_p95 >= 0.95
    assert every.within_p95 > 0.92  # missed: 94% and 93% (docs/estimator.md, Many nodes)
    assert every.median_error < 0.18


def test_slow_code_on_many_nodes_moves_no_number_of_others() -> None:
    """A processor that other code measured keeps its values, so does that code."""
    rows = read_runs(MANY_NODES, gpu_table())
    base = without(CALIBRATION, "nanotron")
    adapted = adapt(rows[::4], base)
    for name in BY_PROCESSOR:
        assert {key: value for key, value in getattr(adapted, name).items() if "nanotron" not in key} == getattr(
            base, name
        )
    assert adapted.pipeline_hop_s["nanotron"] > 10 * 20e-6
    assert set(adapted.pipeline_hop_s) == {"pooled", "nanotron"}
