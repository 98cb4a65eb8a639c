"""Accuracy on many nodes, for accuracy.py and its tests.

Runs of two Llama models on 1 to 64 nodes: many_nodes_runs.csv, which the calibration was fitted to, and the rest in
many_nodes_left_out_runs.csv. Each model is judged by a fit that saw none of its runs: the fastest tenth, the layout
that the estimate prefers at each number of nodes, and the share of runs within the stated 95th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.calibration import Calibration, load
from optimizer.performance.confidence import PIPELINES
from optimizer.performance.fit import adapt
from optimizer.performance.measured_runs import MeasuredRun
from optimizer.performance.types import Bools, Floats
from tools.calibration import MANY_NODES, predict, read_runs

LEFT_OUT = MANY_NODES.with_name("many_nodes_left_out_runs.csv")
# Nodes up to which the cluster ran as it should: on 64 the best run of a model is slower than on 32.
MOST_NODES = 32
# A run is disturbed where a slot of its pipeline takes so many times as long as one that has as much to do.
DISTURBED = 1.7
# Reserved over allocated memory without expandable segments (docs/estimator.md, Memory).
RESERVED = 1.2


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Left-out figures of one model; ``preferred``: by nodes, speed of the preferred layout over the best measured."""

    best_tenth_error: float
    best_tenth_bias: float
    median_error: float
    preferred: dict[int, float]
    within_p95: float


def runs() -> list[MeasuredRun]:
    """All runs of the suite."""
    return [row for path in (MANY_NODES, LEFT_OUT) for row in read_runs(path, gpu_table())]


def disturbed(rows: Sequence[MeasuredRun]) -> Bools:
    """Flag runs slower than the cluster's share: no estimate is used.

    A slot (one micro-batch on one stage) is compared with slots of the same model and tensor ranks on at least as many
    nodes, with at least as large a micro-batch and no more stages (a pipeline with pipelines only).
    """
    nodes, tensor, stages, size, accum = (
        np.array([getattr(row.setup.grid, name) for row in rows])
        for name in ("nodes", "tensor", "pipeline", "micro_batch", "grad_accum")
    )
    models = np.array([row.setup.model.name for row in rows])
    slot = np.array([row.step_time_s for row in rows]) / (accum + stages - 1)
    flags = np.zeros(len(rows), dtype=bool)
    for i in range(len(rows)):
        as_much = (models == models[i]) & (tensor == tensor[i]) & (nodes >= nodes[i]) & (size >= size[i])
        as_much &= (stages <= stages[i]) & ((stages > 1) == (stages[i] > 1))
        flags[i] = slot[i] > DISTURBED * slot[as_much].min()
    return flags


def judge(rows: Sequence[MeasuredRun], calibration: Calibration) -> Judged:
    """Judge ``rows`` by a calibration that saw none of them, with the error that the shipped one states."""
    estimates = predict(rows, calibration)
    error = np.log(estimates.step_time_s / [row.step_time_s for row in rows])
    speed = np.array([row.tokens_per_second_per_gpu for row in rows])
    best = np.argsort(-speed)[: max(1, len(rows) // 10)]
    of_best = np.exp(-error[best]) - 1
    return Judged(
        best_tenth_error=float(np.abs(of_best).mean()),
        best_tenth_bias=float(of_best.mean()),
        median_error=float(np.median(np.abs(error))),
        preferred=_preferred(
            rows, estimates.tokens_per_second, estimates.peak_memory_gib * RESERVED < estimates.limit_gib
        ),
        within_p95=float(np.mean(-error <= 1.645 * np.array([_stated(pipelines=row.setup.pipelines) for row in rows]))),
    )


def _preferred(rows: Sequence[MeasuredRun], predicted: Floats, fits: Bools) -> dict[int, float]:
    nodes = np.array([int(np.asarray(row.setup.grid.nodes)) for row in rows])
    speed = np.array([row.tokens_per_second_per_gpu for row in rows])
    chosen = {}
    for count in sorted(set(nodes.tolist())):
        here = np.flatnonzero((nodes == count) & fits)
        chosen[count] = float(speed[here[np.argmax(predicted[here])]] / speed[nodes == count].max())
    return chosen


def left_out(rows: Sequence[MeasuredRun]) -> dict[str, tuple[Judged, Judged]]:
    """Judge each model without its runs: undisturbed runs up to MOST_NODES, and all up to there."""
    fitted_to = read_runs(MANY_NODES, gpu_table())
    # Without the code's own numbers, which saw both models.
    base = without(load(), "nanotron")
    slow = disturbed(rows)
    small = np.array([int(np.asarray(row.setup.grid.nodes)) <= MOST_NODES for row in rows])
    judged = {}
    for model in sorted({row.setup.model.name for row in rows}):
        fitted = adapt([row for row in fitted_to if row.setup.model.name != model], base)
        of_model = np.array([row.setup.model.name == model for row in rows]) & small
        undisturbed = [row for row, kept in zip(rows, of_model & ~slow, strict=True) if kept]
        every = [row for row, kept in zip(rows, of_model, strict=True) if kept]
        judged[model] = (judge(undisturbed, fitted), judge(every, fitted))
    return judged


def without(calibration: Calibration, framework: str) -> Calibration:
    """Take a framework's numbers and residuals out of a calibration."""
    numbers = {name: getattr(calibration, name) for name in type(calibration).model_fields}
    tables = {name: table for name, table in numbers.items() if isinstance(table, dict)}
    kept = {
        name: {key: value for key, value in table.items() if framework not in key.split()}
        for name, table in tables.items()
    }
    return calibration.model_copy(update=kept)


def _stated(*, pipelines: bool) -> float:
    return load().residuals["nanotron" + PIPELINES * pipelines].relative_error
