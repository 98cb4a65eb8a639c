"""Accuracy of the estimator on measured runs: ``python -m tests.benchmarks.accuracy [--runs CSV] [--out FOLDER]``.

Prints, per suite, the mean absolute percentage error of predicted throughput: of the fit's own rows; of rows whose
model the fit never saw (grouped cross-validation); of a suite the fit never saw. Beside each the bar: one constant MFU
a GPU, given the suite's own rows, its other models, and the other suites. Writes a page and the raw predictions.
"""

from __future__ import annotations

import csv
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.calibrate import (
    RUNS,
    Measured,
    cross_validated_errors,
    fit_rows,
    folds,
    log_errors,
    predict,
    read_runs,
)
from optimizer.performance.calibration import Calibration
from optimizer.performance.types import Floats

RESULTS = Path(__file__).parent / "results"
Fitted = Callable[[Sequence[Measured]], Floats]


def throughput_error(log_error: Floats) -> Floats:
    """Relative error of predicted throughput from log(predicted / measured) step time."""
    return np.asarray(np.exp(-log_error) - 1)


def constant_mfu(train: Sequence[Measured], test: Sequence[Measured], calibration: Calibration) -> Floats:
    """Log errors of the bar: step time from one MFU a GPU, the geometric mean of its training rows'.

    A GPU without training rows has the geometric mean of all. FLOPs are the estimator's own, attention included and
    recomputation not (counting it makes the bar worse on these rows).
    """

    def flop_seconds(rows: Sequence[Measured]) -> Floats:
        found = predict(rows, calibration)  # MFU x step time: seconds at peak, whatever the calibration
        return np.asarray(found.mfu * found.step_time_s)

    log_mfu = np.log(flop_seconds(train) / [row.step_time_s for row in train])
    train_gpus = np.array([row.run.hardware.gpu.key for row in train])
    mean = {key: log_mfu[train_gpus == key].mean() for key in set(train_gpus)}
    log_times = np.log(flop_seconds(test)) - [mean.get(row.run.hardware.gpu.key, log_mfu.mean()) for row in test]
    return np.asarray(log_times - np.log([row.step_time_s for row in test]))


def measure(rows: Sequence[Measured]) -> dict[str, Floats]:
    """Log errors of every row, by way of predicting it."""
    shipped = fit_rows(rows)
    suites = np.array([row.suite for row in rows])
    found = {"fitted": log_errors(rows, shipped), "models": cross_validated_errors(rows), "suites": np.zeros(len(rows))}
    found |= {f"constant {name}": np.zeros(len(rows)) for name in ("fitted", "models", "suites")}
    for suite in sorted(set(suites)):
        inside = np.flatnonzero(suites == suite)
        own, others = [rows[int(i)] for i in inside], [row for row in rows if row.suite != suite]
        found["constant fitted"][inside] = constant_mfu(own, own, shipped)
        if others:
            found["suites"][inside] = log_errors(own, fit_rows(others))
            found["constant suites"][inside] = constant_mfu(others, own, shipped)
        # The bar is given the other models of the same suite, its best case.
        for test in folds(own):
            train = [row for index, row in enumerate(own) if index not in set(test)]
            held = [own[index] for index in test]
            found["constant models"][inside[test]] = constant_mfu(train or held, held, shipped)
    return found


def page(rows: Sequence[Measured], errors: dict[str, Floats], command: str) -> str:
    """The benchmark's page, Markdown."""
    suites = np.array([row.suite for row in rows])
    lines = [
        "# Accuracy of step time and memory on measured runs",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, `{command}`, Python {platform.python_version()}, numpy "
        f"{version('numpy')}, gpufleet {version('gpufleet')}, {platform.machine()}. The fit uses no accelerator and is "
        "deterministic. Raw predictions: the CSV beside this page.",
        "",
        "Mean absolute percentage error of throughput, per cent (mean error in brackets: above 0 is too fast).",
        "",
        "- *own rows*: fitted to all rows;",
        "- *new model*: rows of a model (within its suite) that the fit never saw;",
        "- *new suite*: none of the suite's rows were seen, so nothing of a framework that only it has;",
        "- *constant*: the bar, one MFU a GPU, from the suite's own rows, its other models, the other suites.",
        "",
        "| suite | rows | own rows | constant | new model | constant | new suite | constant |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for suite in [*sorted(set(suites)), "all"]:
        mine = suites == suite if suite != "all" else np.ones(len(rows), dtype=bool)
        cells = []
        for name in ("fitted", "constant fitted", "models", "constant models", "suites", "constant suites"):
            error = throughput_error(errors[name][mine])
            bias = "" if name.startswith("constant") else f" ({100 * error.mean():+.1f})"
            cells.append(f"{100 * np.abs(error).mean():.1f}{bias}")
        lines.append(f"| {suite} | {mine.sum()} | {' | '.join(cells)} |")
    estimates = predict(rows, fit_rows(rows))
    peaks = [(row, peak) for row, peak in zip(rows, estimates.peak_memory_gib, strict=True) if row.peak_memory_gib]
    gaps = np.array([peak / row.peak_memory_gib - 1 for row, peak in peaks if row.peak_memory_gib])
    if gaps.size:
        lines += [
            "",
            f"Peak memory, {gaps.size} measured rows: mean absolute error "
            f"{100 * np.abs(gaps).mean():.1f}%, from {100 * gaps.min():+.1f}% to {100 * gaps.max():+.1f}%. "
            "No least-squares fit, but four constants (DDP buckets, rotary and norm copies, CNN workspace) were read "
            "off the first 24 of these rows.",
        ]
    lines += ["", f"Predicted to fit: {int(estimates.fits.sum())} of {len(rows)} runs, all of which really ran.", ""]
    return "\n".join(lines)


@click.command()
@click.option("--runs", type=click.Path(path_type=Path, exists=True), default=RUNS, help="Measured runs.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Where to write.")
def main(runs: Path, out: Path) -> None:
    """Measure the estimator's accuracy and write it down."""
    rows = read_runs(runs, gpu_table())
    errors = measure(rows)
    command = "python -m tests.benchmarks.accuracy" + ("" if runs == RUNS else f" --runs {runs.name}")
    text = page(rows, errors, command)
    stem = out / f"accuracy_{datetime.now(UTC):%Y%m}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [f"{name} throughput error".replace(" ", "_") for name in errors]
        writer.writerow(["row_id", "suite", "model", "gpu", "measured_step_time_s", *names])
        columns = [throughput_error(values) for values in errors.values()]
        for index, row in enumerate(rows):
            cells = [f"{column[index]:.4f}" for column in columns]
            name, gpu = row.run.model.name, row.run.hardware.gpu.key
            writer.writerow([row.row_id, row.suite, name, gpu, f"{row.step_time_s:.6g}", *cells])
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
