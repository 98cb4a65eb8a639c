"""Accuracy of the estimator on measured runs: ``python -m tests.benchmarks.accuracy [--runs CSV] [--out FOLDER]``.

Mean absolute percentage error of predicted throughput per suite: of the fit's own rows, of left-out models (grouped
cross-validation) and of left-out suites.
Then runs that only judge (published ones, one H100's, nanotron's), peak memory, the gain from user runs, and the goals.
Writes a page (accuracy_page.py) and the raw predictions.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import Calibration, load
from optimizer.performance.fit import adapt, left_out_errors
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors, throughput_error
from optimizer.performance.rows import Row, read_row
from optimizer.performance.table import estimate_case
from optimizer.performance.types import Bools, Floats
from tests.benchmarks.many_nodes import Judged, left_out
from tests.benchmarks.many_nodes import runs as nanotron_runs
from tools.calibration import (
    LEARNED,
    NOT_JUDGED,
    ONE_H100,
    PUBLIC,
    RESULTS,
    cell_of_run,
    fit_rows,
    judged_runs,
    judging_runs,
    learned_runs,
    left_out_by_suite,
    predict,
    read_runs,
    stated_errors,
)

OUT_OF_MEMORY = RUNS.parent / "out_of_memory_runs.csv"
# Own rows given to ``adapt`` in turn, and how many random choices of them are averaged.
OWN_ROWS = (1, 2, 3, 5, 10, 20)
NORMAL_P95 = 1.645
CHOICES = 8


@dataclass(frozen=True, kw_only=True)
class JudgedSuite:
    """Shipped calibration on runs it was not fitted to (but those of LEARNED): log errors, and runs within its p95."""

    name: str
    gpus: tuple[int, int]
    log_errors: Floats
    within_p95: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """Contents of the page and the raw file; arrays have one entry a row.

    Attributes:
        errors: log(predicted / measured) step time by method.
        ran_out: by allocator setting, the runs out of memory: their number, and the ids predicted to fit.
        own_rows: by suite left out, mean absolute percentage error of its unseen rows by number of own rows.
        judged: suites of published runs and of other machines.
        nanotron: by model left out, its undisturbed runs and all.
        within_p95: by kind of run, suite left out, and its runs: those within the 95th percentile of other suites.
    """

    rows: list[MeasuredRun]
    errors: dict[str, Floats]
    peak_memory_gib: Floats
    fits: Bools
    ran_out: dict[str, tuple[int, list[str]]]
    own_rows: dict[str, dict[int, float]]
    judged: tuple[JudgedSuite, ...] = ()
    nanotron: Mapping[str, tuple[Judged, Judged]] = field(default_factory=dict)
    within_p95: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)

    @property
    def suites(self) -> list[str]:
        """Names of the suites, sorted."""
        return sorted({row.suite for row in self.rows})


def measure(rows: Sequence[MeasuredRun]) -> dict[str, Floats]:
    """Compute the log errors of every row, by method."""
    return {
        "fitted": log_errors(rows, fit_rows(rows)),
        "models": left_out_errors(rows, fit_rows),
        "suites": left_out_by_suite(rows, fit_rows),
    }


def mean_absolute_percentage(log_error: Floats) -> float:
    """Mean absolute error of predicted throughput, per cent."""
    return float(100 * np.abs(throughput_error(log_error)).mean())


def own_rows_curve(rows: Sequence[MeasuredRun]) -> dict[str, dict[int, float]]:
    """Compute the error after adapting to some rows of a suite, from a fit to the other suites.

    The mean over CHOICES random choices; the error is of the suite's rows that were not chosen.
    """
    curve: dict[str, dict[int, float]] = {}
    for suite in sorted({row.suite for row in rows}):
        own, others = [row for row in rows if row.suite == suite], [row for row in rows if row.suite != suite]
        if not others:
            continue
        base = fit_rows(others).model_copy(update={"residuals": load().residuals})
        curve[suite] = {0: mean_absolute_percentage(log_errors(own, base))}
        for count in (count for count in OWN_ROWS if count <= len(own) // 2):
            errors = []
            for choice in range(CHOICES):
                order = np.random.default_rng(choice).permutation(len(own))
                chosen, unseen = ([own[int(i)] for i in part] for part in (order[:count], order[count:]))
                errors.append(mean_absolute_percentage(log_errors(unseen, adapt(chosen, base))))
            curve[suite][count] = float(np.mean(errors))
    return curve


def ran_out_of_memory(
    path: Path, gpus: Mapping[str, Gpu], calibration: Calibration
) -> dict[str, tuple[int, list[str]]]:
    """Count the runs out of memory by allocator setting, with the ids predicted to fit."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    setups = [read_row(Row.read(row), gpus) for row in rows]
    fits = np.array([estimate_case(setup, setup.coefficients(calibration)).fits for setup in setups])
    counts: dict[str, tuple[int, list[str]]] = {}
    for row, fit_ in zip(rows, fits, strict=True):
        count, wrong = counts.get(row["allocator"], (0, []))
        counts[row["allocator"]] = (count + 1, [*wrong, row["row_id"]] if fit_ else wrong)
    return counts


def judge(name: str, rows: Sequence[MeasuredRun], calibration: Calibration) -> JudgedSuite:
    """Judge the calibration and the error that it states on ``rows``."""
    errors = log_errors(rows, calibration)
    stated = [row.setup.speed_source(calibration)[0].relative_error for row in rows]
    gpus = [int(row.setup.gpus) for row in rows]
    within = int(np.count_nonzero(-errors <= NORMAL_P95 * np.array(stated)))
    return JudgedSuite(name=name, gpus=(min(gpus), max(gpus)), log_errors=errors, within_p95=within)


def judged_suites(gpus: Mapping[str, Gpu], calibration: Calibration) -> tuple[JudgedSuite, ...]:
    """Judge the published suites by precision, and one H100."""
    judged = []
    published = read_runs(PUBLIC, gpus)
    for suite in sorted({row.suite for row in published}, key=lambda suite: (suite != LEARNED, suite)):
        own = [row for row in published if row.suite == suite]
        for precision in sorted({row.setup.recipe.precision for row in own}):
            of_precision = [row for row in own if row.setup.recipe.precision == precision]
            name = f"{suite}, {precision}"
            judged.append(judge(f"{name} (learned from)" if suite == LEARNED else name, of_precision, calibration))
    steps = [row for row in read_runs(ONE_H100, gpus) if row.row_id not in NOT_JUDGED]
    for kind, convolutional in (("decoders and BERT", False), ("ResNets", True)):
        of_kind = [row for row in steps if row.setup.model.convolutional == convolutional]
        judged.append(judge(f"one H100, {kind}", of_kind, calibration))
    return tuple(judged)


def within_p95(rows: Sequence[MeasuredRun]) -> dict[str, dict[str, tuple[int, int]]]:
    """Count by kind and suite the runs, and those within the p95 that the other suites state."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    base = fit_rows(rows)
    judged = judged_runs(rows, judging_runs(gpu_table()), base)
    for suite in sorted({row.suite for row, _ in judged}):
        stated = stated_errors([run for run in judged if run[0].suite != suite], base)
        for row, error in judged:
            if row.suite == suite:
                kind, cell = cell_of_run(row, base)
                runs, within = counts.setdefault(kind, {}).get(suite, (0, 0))
                is_within = -error <= NORMAL_P95 * stated.get(cell, stated[kind]).relative_error
                counts[kind][suite] = (runs + 1, within + is_within)
    return counts


def run(rows: list[MeasuredRun]) -> Results:
    """Measure everything."""
    shipped = fit_rows(rows)
    estimates = predict(rows, shipped)
    return Results(
        rows=rows,
        errors=measure(rows),
        peak_memory_gib=estimates.peak_memory_gib,
        fits=estimates.fits,
        ran_out=ran_out_of_memory(OUT_OF_MEMORY, gpu_table(), shipped),
        own_rows=own_rows_curve(rows),
        judged=judged_suites(gpu_table(), load()),
        nanotron=left_out(nanotron_runs()),
        within_p95=within_p95(rows),
    )


def write_raw(path: Path, results: Results) -> None:
    """Write every row with its measurement and predictions as CSV; step times in seconds, memory in GiB."""
    lines: list[dict[str, Any]] = []
    for index, row in enumerate(results.rows):
        line: dict[str, Any] = {
            "row_id": row.row_id,
            "suite": row.suite,
            "model": row.setup.model.name,
            "gpu": row.setup.hardware.gpu.key,
            "measured_step_time_s": row.step_time_s,
            "measured_peak_memory_gib": row.peak_memory_gib,
            "predicted_peak_memory_gib": float(results.peak_memory_gib[index]),
            "fits": str(bool(results.fits[index])).lower(),
        }
        for name, errors in results.errors.items():
            line[f"{name.replace(' ', '_')}_step_time_s"] = row.step_time_s * float(np.exp(errors[index]))
        lines.append({key: f"{cell:.6g}" if isinstance(cell, float) else cell for key, cell in line.items()})
    with path.open("w", encoding="utf-8", newline="") as file:
        columns = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


@click.command()
@click.option("--runs", type=click.Path(path_type=Path, exists=True), default=RUNS, help="Measured runs.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Where to write.")
def main(runs: Path, out: Path) -> None:
    """Measure the estimator's accuracy and write it down."""
    from tests.benchmarks.accuracy_page import page

    rows = read_runs(runs, gpu_table())
    results = run(rows + learned_runs(gpu_table()) if runs == RUNS else rows)
    command = "python -m tests.benchmarks.accuracy" + ("" if runs == RUNS else f" --runs {runs.name}")
    text = page(results, command)
    stem = out / f"accuracy_{datetime.now(UTC):%Y%m}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    write_raw(stem.with_suffix(".csv"), results)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
