from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.calibration import POOLED, Calibration, Residual
from optimizer.performance.case import Case
from optimizer.performance.confidence import DENSE
from optimizer.performance.fit import LEAST_ERROR, adapt, conformal, folds, left_out_errors, residuals
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors
from tests.unit.optimizer.performance.fixtures import CALIBRATION as SHIPPED
from tools.calibration import predict, read_runs


@functools.cache
def rows_of(suite: str) -> tuple[MeasuredRun, ...]:
    return tuple(row for row in read_runs(RUNS, gpu_table()) if row.suite == suite)


def on(rows: Sequence[MeasuredRun], gpu: str) -> list[MeasuredRun]:
    """The rows, run on another GPU at the speed the shipped calibration gives it."""
    moved = []
    for row in rows:
        hardware = replace(row.setup.hardware, gpu=gpu_table()[gpu])
        setup = Case(row.setup.model, row.setup.recipe, hardware, row.setup.grid)
        moved.append(replace(row, setup=setup, peak_memory_gib=None))
    return at_speed(moved, SHIPPED)


def at_speed(rows: Sequence[MeasuredRun], truth: Calibration, factor: float = 1.0) -> list[MeasuredRun]:
    """The rows with the throughput that ``truth`` gives them, times ``factor``."""
    speeds = predict(rows, truth).tokens_per_second
    return [
        replace(row, tokens_per_second_per_gpu=factor * float(speed / row.setup.gpus))
        for row, speed in zip(rows, speeds, strict=True)
    ]


def mean_error(rows: Sequence[MeasuredRun], calibration: Calibration) -> float:
    return float(np.abs(log_errors(rows, calibration)).mean())


def test_runs_as_predicted_change_nothing() -> None:
    rows = at_speed(rows_of("llmfoundry")[:10], SHIPPED)
    adapted = adapt(rows, SHIPPED)
    for name, value in adapted.model_dump().items():
        if isinstance(value, dict) and name != "residuals":
            # Each coefficient that a row uses gets a value of its own, the one it had.
            assert {key: value[key] for key in getattr(SHIPPED, name)} == pytest.approx(
                getattr(SHIPPED, name), rel=1e-4
            )


def test_a_slower_setup_is_learned_the_better_the_more_of_it_is_measured() -> None:
    """An L4 no row knows, a third slower than pooled: each number of rows predicts the rows it never saw better."""
    rows = at_speed(on(rows_of("llmfoundry")[::4], "l4-24gb"), SHIPPED, factor=0.67)
    unseen = rows[10:]
    errors = [mean_error(unseen, adapt(rows[:count], SHIPPED)) for count in (1, 3, 10)]
    assert mean_error(unseen, SHIPPED) == pytest.approx(0.4, abs=0.01)
    assert 0.38 > errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.15


def test_one_run_moves_a_gpu_with_many_rows_less_than_one_without() -> None:
    left = {}
    for gpu in ("a100-80gb", "l4-24gb"):
        slow = at_speed(on(rows_of("llmfoundry")[:1], gpu), SHIPPED, factor=0.8)
        left[gpu] = mean_error(slow, adapt(slow, SHIPPED)) / mean_error(slow, SHIPPED)
    assert 0.5 < left["a100-80gb"] < 0.98  # some of it is believed, and little
    assert left["l4-24gb"] < left["a100-80gb"] - 0.05


def test_a_wild_run_is_not_believed() -> None:
    """One run ten times too slow among nine good ones moves the others by a few per cent."""
    rows = at_speed(rows_of("llmfoundry")[:10], SHIPPED)
    wild = replace(rows[0], tokens_per_second_per_gpu=rows[0].tokens_per_second_per_gpu / 10)
    assert mean_error(rows[1:], adapt([wild, *rows[1:]], SHIPPED)) < 0.05


def test_other_gpus_and_frameworks_keep_their_values() -> None:
    rows = at_speed(on(rows_of("llmfoundry")[:3], "l4-24gb"), SHIPPED, factor=0.5)
    adapted = adapt(rows, SHIPPED)
    assert adapted.matmul_efficiency["L4"] < SHIPPED.matmul_efficiency[POOLED]
    assert mean_error(rows_of("vtrain"), adapted) == pytest.approx(mean_error(rows_of("vtrain"), SHIPPED), abs=1e-9)


def test_an_error_left_out_is_of_a_fit_that_never_saw_the_model() -> None:
    rows = list(rows_of("h200"))
    seen: list[set[str]] = []

    def fitter(train: Sequence[MeasuredRun]) -> Calibration:
        seen.append({row.setup.model.name for row in train})
        return SHIPPED

    left_out_errors(rows, fitter)
    for models, test in zip(seen, folds(rows), strict=True):
        assert not models & {rows[index].setup.model.name for index in test}


def test_rows_of_one_model_are_left_out_one_by_one() -> None:
    rows = [row for row in rows_of("h200") if row.setup.model.name == "llama-410m"][:5]
    assert [len(part) for part in folds(rows)] == [1] * len(rows)
    assert folds(rows[:1]) == [[0]]


def test_an_error_comes_from_the_rows_left_out_once_they_show_a_tail() -> None:
    rows = on(rows_of("llmfoundry")[::2], "l4-24gb")
    before, cell = SHIPPED.residuals[POOLED].relative_error, f"{DENSE} on L4 in composer-fsdp"
    few = residuals(rows[:2], np.full(2, -0.05), SHIPPED)[cell]
    many = residuals(rows, np.full(len(rows), -0.05), SHIPPED)[cell]
    assert few == Residual(rows=2, relative_error=before)
    assert many.rows == len(rows) > 19
    assert many.relative_error == pytest.approx(0.05 / 1.645, abs=1e-3)
    slow = residuals(rows[:2], np.array([-0.05, -0.7]), SHIPPED)[cell]
    assert slow.relative_error == pytest.approx(0.7 / 1.645, abs=1e-3)
    assert residuals(rows, np.zeros(len(rows)), SHIPPED)[DENSE] == SHIPPED.residuals[DENSE]


def test_one_run_in_20_is_slower_than_the_95th_percentile() -> None:
    assert conformal([("a", error) for error in [-0.7] + 18 * [0.0]]) == pytest.approx(0.7 / 1.645, abs=1e-3)
    errors = np.linspace(-0.8, 0.0, 200)
    worse = [("a", float(error)) for error in errors]
    assert np.mean(-errors <= 1.645 * conformal(worse)) == pytest.approx(0.95, abs=0.01)
    assert conformal([("a", 0.5)] * 40) == LEAST_ERROR  # all faster than predicted
    # An unseen model may be like either, however many rows the better one has.
    alike = conformal([*worse, *[("b", 0.0)] * 200])
    assert conformal([*worse, *[("b", 0.0)] * 1000]) == pytest.approx(alike, abs=0.01)
    assert 0.4 < alike < conformal(worse)


def test_one_model_never_proves_an_error_below_what_was_stated() -> None:
    bf16 = [row for row in rows_of("h200") if row.setup.recipe.precision == "bf16"]
    rows = on([row for row in bf16 if row.setup.model.name == "llama-410m"], "l4-24gb") * 20
    stated = residuals(rows, np.zeros(len(rows)), SHIPPED)[f"{DENSE} on L4 in torch"]
    assert stated == Residual(rows=len(rows), relative_error=SHIPPED.residuals[POOLED].relative_error)


def test_what_splits_and_nodes_add_is_no_part_of_a_cell() -> None:
    """Two runs over EFA through host memory, which states log 2, leave the error of their GPU's other layouts."""
    run = next(row for row in rows_of("h200") if row.setup.model.name == "llama-410m")
    was = run.setup
    cell = f"{DENSE} on H100 in torch"
    hardware = replace(was.hardware, gpu=gpu_table()["h100-80gb"], gpus_per_node=1, efa=True, gpudirect=False)
    for changes in ({"nodes": 2, "data": 2}, {"nodes": 1, "data": 1, "tensor": 2}):
        setup = Case(was.model, was.recipe, hardware, replace(was.grid, **changes))
        assert setup.speed_source(SHIPPED)[0].relative_error >= SHIPPED.residuals[POOLED].relative_error
        stated = residuals([replace(run, setup=setup)] * 2, np.zeros(2), SHIPPED)[cell]
        assert stated.relative_error == SHIPPED.residuals[cell].relative_error
