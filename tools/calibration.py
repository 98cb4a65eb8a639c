"""Fits the shipped calibration to the shipped runs: ``python -m tools.calibration`` writes data/calibration.json.

The fit of ``optimizer.performance.fit``, with errors of models, processors and frameworks left out. nanotron's numbers
and those of the GPUs that only NVIDIA's runs show are added on top, and move no number of another's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import (
    BY_PROCESSOR,
    CALIBRATION,
    POOLED,
    Calibration,
    Residual,
)
from optimizer.performance.confidence import DENSE, EIGHT_BITS, PIPELINES, cell_of, code_of, kind_of
from optimizer.performance.fit import (
    ROWS_OF_A_TAIL,
    START,
    Fitter,
    adapt,
    conformal,
    factors_of,
    left_out_errors,
    solve,
)
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors, usable_runs
from optimizer.performance.rows import read_table
from optimizer.performance.table import estimate_case
from optimizer.performance.types import Estimates, Floats

# Runs of nanotron on 1 to 32 nodes, whose numbers are added on top.
MANY_NODES = RUNS.with_name("many_nodes_runs.csv")
# Mixtures and adapters in NVIDIA's code, and its dense models on Blackwell: what they show is added on top. Other rows
# only judge.
NVIDIA = RUNS.with_name("nvidia_runs.csv")
# Runs on one H100 that nothing is fitted to; not judged are those in the default layout and those whose host, four
# times as slow as the estimate's, sets the pace (encoders_h100_202611.md).
RESULTS = Path(__file__).parents[1] / "tests" / "benchmarks" / "results"
ONE_H100 = RESULTS / "h100_steps_202611.csv"
NOT_JUDGED = ("h100-steps-00", "h100-steps-01", "h100-steps-09", "h100-steps-12")
# The reference trainer on one H200, and mixtures in a plain loop there.
ONE_H200 = (RESULTS / "finetuning_h200_202611.csv", RESULTS / "mixtures_h200_202611.csv")
# Published runs: the shipped calibration is fitted to suite LEARNED too, all others judge it (data/PROVENANCE.md).
PUBLIC = RUNS.with_name("public_runs.csv")
LEARNED = "dgxc-llama"
# Error of the equations, log units: rows of one suite share it, so the starts keep their say.
NOISE = 0.1
# Kinds of data-centre GPU that predict each other say little of a 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# Runs of a processor that fit numbers of its own.
FEWEST_ROWS = 8

JudgedRun = tuple[MeasuredRun, float]  # with its log error


def read_runs(path: Path, gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read a table of measured runs, all of them usable."""
    rows, refused, _ = usable_runs(read_table(path)[1], gpus)
    if refused:
        raise InvalidInputError(
            f"{path} line {refused[0].line}: {refused[0].reason}",
            limit="a run with its throughput",
            why="a calibration never skips a measurement silently",
            next_step="mend or remove the line",
        )
    return rows


def learned_runs(gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read the published runs that the shipped calibration is fitted to beside RUNS."""
    return [row for row in read_runs(PUBLIC, gpus) if row.suite == LEARNED]


def judging_runs(gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read NVIDIA's runs and our own that nothing is fitted to."""
    own = [row for path in (ONE_H100, *ONE_H200) for row in read_runs(path, gpus) if row.row_id not in NOT_JUDGED]
    return [*read_runs(NVIDIA, gpus), *own]


def predict(rows: Sequence[MeasuredRun], calibration: Calibration) -> Estimates:
    """Estimate the rows."""
    estimates = [estimate_case(row.setup, row.setup.coefficients(calibration)) for row in rows]

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {part: join([value[part] for value in values]) for part in values[0]}
        return np.concatenate([np.ravel(value) for value in values])

    return Estimates(
        **{field.name: join([getattr(each, field.name) for each in estimates]) for field in fields(Estimates)}
    )


def fit_rows(rows: Sequence[MeasuredRun]) -> Calibration:
    """Fit a calibration without residuals to the measured time of one step of each run; suites weigh alike."""
    start: dict[str, Any] = {name: {POOLED: item.value} for name, item in START.items()}
    start["precision_efficiency"] = {}
    nothing = {POOLED: Residual(rows=0, relative_error=0.0)}
    base = Calibration(**start, residuals=nothing, rows=len(rows), source="", as_of=date.min)
    count = Counter(row.suite for row in rows)
    weights = np.sqrt([len(rows) / len(count) / count[row.suite] for row in rows]) / NOISE
    own = [factors_of(row.setup) for row in rows]
    used = {key for names in own for keys in names.values() for key in keys}
    spreads = {(field, key): START[field].spread if key == POOLED else START[field].group for field, key in used}
    return solve(rows, base, own, spreads, weights)


def add_framework(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """Add code whose runs move no number of another's to ``base``, with errors of its own."""
    left_out = left_out_errors(rows, lambda train: adapt(train, base))
    found = dict(base.residuals)
    for pipelines in (False, True):
        errors = [
            (row.setup.model.name, float(error))
            for row, error in zip(rows, left_out, strict=True)
            if row.setup.pipelines == pipelines
        ]
        name = rows[0].setup.recipe.framework + PIPELINES * pipelines
        # Two models do not weigh alike: a third may be like the worse.
        worst = max(conformal([run for run in errors if run[0] == model]) for model, _ in errors)
        found[name] = Residual(rows=len(errors), relative_error=worst)
    return adapt(rows, base).model_copy(update={"residuals": found})


def add_processors(rows: Sequence[MeasuredRun], base: Calibration) -> Calibration:
    """Add the numbers of GPUs that ``base`` does not know, from dense runs and adapters of code that it knows."""
    dense = [row for row in _of_processors(rows) if _processor(row) not in base.matmul_efficiency]
    codes = Counter((_processor(row), row.setup.recipe.framework) for row in dense)
    dense = [row for row in dense if codes[_processor(row), row.setup.recipe.framework] >= FEWEST_ROWS]
    counts = Counter(_processor(row) for row in dense)
    wide = Counter(_processor(row) for row in dense if row.setup.recipe.precision != "fp8")
    narrow = {
        die + EIGHT_BITS: Residual(rows=counts[die], relative_error=base.residuals[POOLED].relative_error)
        for die in counts
        if wide[die] < FEWEST_ROWS
    }
    return adapt(dense, base, BY_PROCESSOR).model_copy(update={"residuals": base.residuals | narrow})


def left_out_by_suite(rows: Sequence[MeasuredRun], fitter: Fitter) -> Floats:
    """Compute the log errors of each row from a fit to the other suites."""
    suites = np.array([_suite(row) for row in rows])
    errors = np.zeros(len(rows))
    for suite in sorted(set(suites)):
        inside = np.flatnonzero(suites == suite)
        own, others = [rows[int(i)] for i in inside], [row for row in rows if _suite(row) != suite]
        errors[inside] = log_errors(own, fitter(others or own))
    return errors


def judged_runs(rows: Sequence[MeasuredRun], others: Sequence[MeasuredRun], base: Calibration) -> list[JudgedRun]:
    """Pair runs with their log errors, with their suites left out of the fit."""
    errors = left_out_by_suite(rows, fit_rows), left_out_by_suite(others, lambda train: add_processors(train, base))
    return list(zip([*rows, *others], np.concatenate(errors).tolist(), strict=True))


def cell_of_run(row: MeasuredRun, base: Calibration) -> tuple[str, str]:
    """Kind and cell of a run."""
    kind = kind_of(row.setup.model, row.setup.recipe, base, pipelines=False)
    return kind, cell_of(kind, row.setup.hardware.gpu, row.setup.recipe)


def stated_errors(judged: Sequence[JudgedRun], base: Calibration) -> dict[str, Residual]:
    """Errors by cell and by kind.

    A cell has an error where it has the rows of a tail, from two suites: all such cells of a kind in one code share
    theirs. The runs of a kind's other cells show how far its numbers transfer; their error, or a larger one of a cell,
    is the kind's.
    """
    cells: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for row, error in judged:
        kind, cell = cell_of_run(row, base)
        cells.setdefault((kind, code_of(row.setup.recipe), cell), []).append((row.suite, error))
    known = {key for key, runs in cells.items() if len(runs) >= ROWS_OF_A_TAIL and len(dict(runs)) > 1}
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for (kind, code, cell), runs in cells.items():
        groups.setdefault((kind, code if (kind, code, cell) in known else ""), []).extend(runs)
    errors = {group: conformal(runs) for group, runs in groups.items()}
    # Runs that were all faster than predicted say little of the next: no kind is surer than its code's dense models.
    errors = {(kind, code): max(error, errors.get((DENSE, code), 0.0)) for (kind, code), error in errors.items()}
    found = {
        cell: Residual(rows=len(cells[kind, code, cell]), relative_error=errors[kind, code])
        for kind, code, cell in sorted(known)
    }
    for kind in sorted({kind for kind, _ in errors}):
        count = sum(len(runs) for (of_kind, _), runs in groups.items() if of_kind == kind)
        widest = max(error for (of_kind, _), error in errors.items() if of_kind == kind)
        found[kind] = Residual(rows=count, relative_error=widest)
    return found


def fit(rows: Sequence[MeasuredRun], others: Sequence[MeasuredRun] = ()) -> Calibration:
    """Fit a calibration to ``rows``, with the errors of suites left out, those of ``others`` too, and of processors."""
    base = fit_rows(rows)
    found = stated_errors(judged_runs(rows, others, base), base)
    errors = [(die, float(error)) for die in sorted({*map(_processor, rows)}) for error in _errors_without(die, rows)]
    dense = [row for row in _of_processors(others) if _processor(row) not in base.matmul_efficiency]
    errors += [("Blackwell", float(error)) for error in log_errors(dense, base)] if dense else []
    error = max(conformal(errors) if errors else math.log(2), LEAST_ERROR_OF_A_NEW_GPU)
    return base.model_copy(update={"residuals": found | {POOLED: Residual(rows=0, relative_error=error)}})


def fit_shipped() -> Calibration:
    """Fit the calibration that ships, but for its source and date."""
    gpus = gpu_table()
    others = judging_runs(gpus)
    fitted = fit([*read_runs(RUNS, gpus), *learned_runs(gpus)], others)
    return add_processors(others, add_framework(read_runs(MANY_NODES, gpus), fitted))


def _suite(row: MeasuredRun) -> str:
    """The suite of a row; all rounds of MLPerf are one, and all releases of Bridge."""
    return next((name for name in ("mlperf", "bridge") if row.suite.startswith(name)), row.suite)


def _of_processors(rows: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that show a processor's numbers: dense decoders and adapters."""
    return [row for row in rows if not row.setup.model.experts and row.setup.model.architecture == "decoder"]


def _processor(row: MeasuredRun) -> str:
    return row.setup.hardware.gpu.die


def _errors_without(die: str, rows: Sequence[MeasuredRun]) -> Floats:
    """Log errors of a processor's rows by a fit to the rest, of code that the rest knows."""
    rest = [row for row in rows if _processor(row) != die]
    known = {row.setup.recipe.framework for row in rest}
    left = [row for row in rows if _processor(row) == die and row.setup.recipe.framework in known]
    return log_errors(left, fit_rows(rest)) if left else np.zeros(0)


def main() -> None:
    """Write the shipped calibration."""
    gpus = gpu_table()
    rows, published = read_runs(RUNS, gpus), len(learned_runs(gpus))
    suites = ", ".join(sorted({row.suite for row in rows}))
    digest = hashlib.sha256(RUNS.read_bytes()).hexdigest()[:12]
    source = (
        f"{len(rows)} measured runs of {suites} ({RUNS.name}, sha256 {digest}) and {published} published ones "
        f"({PUBLIC.name}, {LEARNED}); Blackwell and L40S: {NVIDIA.name}"
    )
    today: date = datetime.now(UTC).date()
    fitted = fit_shipped().model_copy(update={"source": source, "as_of": today})
    CALIBRATION.write_text(fitted.model_dump_json(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
