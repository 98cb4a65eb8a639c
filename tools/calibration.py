"""Fits the shipped calibration to the shipped runs: ``python -m tools.calibration`` writes data/calibration.json.

The fit of ``optimizer.performance.fit``, with errors of models, processors and frameworks left out. nanotron's numbers
and those of the GPUs that only NVIDIA's runs show are added on top, and move no number of another's.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    NEW_FRAMEWORK,
    POOLED,
    Calibration,
    Residual,
)
from optimizer.performance.confidence import EIGHT_BITS, PIPELINES, kind_of
from optimizer.performance.fit import START, Fitter, adapt, conformal, factors_of, left_out_errors, solve
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors, read_usable_runs
from optimizer.performance.table import estimate_case
from optimizer.performance.types import Estimates, Floats

# Runs of nanotron on 1 to 32 nodes, whose numbers are added on top.
MANY_NODES = RUNS.with_name("many_nodes_runs.csv")
# Mixtures and adapters in NVIDIA's code, and its dense models on Blackwell: what they show is added on top.
NVIDIA = RUNS.with_name("nvidia_runs.csv")
# Published runs: the shipped calibration is fitted to suite LEARNED too, all others judge it (data/PROVENANCE.md).
PUBLIC = RUNS.with_name("public_runs.csv")
LEARNED = "dgxc-llama"
# Error of the equations, log units: rows of one suite share it, so the starts keep their say.
NOISE = 0.1
# Kinds of data-centre GPU that predict each other say little of a 72 W L4.
LEAST_ERROR_OF_A_NEW_GPU = 0.2
# Runs of a processor that fit numbers of its own.
FEWEST_ROWS = 8

KindErrors = dict[str, list[tuple[str, float]]]


def read_runs(path: Path, gpus: Mapping[str, Gpu]) -> list[MeasuredRun]:
    """Read a table of measured runs, all of them usable."""
    rows, refused, _ = read_usable_runs(path, gpus)
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


def predict(rows: Sequence[MeasuredRun], calibration: Calibration) -> Estimates:
    """Estimate the rows."""
    estimates = [estimate_case(row.setup.case(), row.setup.coefficients(calibration)) for row in rows]

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
    counts = Counter(_processor(row) for row in dense)
    new = [die for die, count in counts.items() if count >= FEWEST_ROWS]
    dense = [row for row in dense if _processor(row) in new]
    wide = Counter(_processor(row) for row in dense if row.setup.recipe.precision != "fp8")
    narrow = {
        die + EIGHT_BITS: Residual(rows=counts[die], relative_error=base.residuals[POOLED].relative_error)
        for die in new
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


def judged_kinds(rows: Sequence[MeasuredRun], nvidia: Sequence[MeasuredRun], base: Calibration) -> KindErrors:
    """List (release, log error) of the rows of each kind of run, with their suites left out."""
    judged: KindErrors = {}
    for some, fitter in ((rows, fit_rows), (nvidia, lambda train: add_processors(train, base))):
        for row, error in zip(some, left_out_by_suite(some, fitter).tolist(), strict=True):
            kind = kind_of(row.setup.model, row.setup.recipe, base, pipelines=False)
            judged.setdefault(kind, []).append((row.suite, error))
    return judged


def fit(rows: Sequence[MeasuredRun], nvidia: Sequence[MeasuredRun] = ()) -> Calibration:
    """Fit a calibration to ``rows``, with errors by kind of run, and of processors and frameworks left out."""
    base = fit_rows(rows)
    found = {
        kind: Residual(rows=len(errors), relative_error=conformal(errors))
        for kind, errors in judged_kinds(rows, nvidia, base).items()
    }
    dense = [row for row in _of_processors(nvidia) if _processor(row) not in base.matmul_efficiency]
    blackwell = [("Blackwell", float(error)) for error in log_errors(dense, base)] if dense else []
    for name, column, other in ((POOLED, _processor, _framework), (NEW_FRAMEWORK, _framework, _processor)):
        errors = _left_out_group_errors(rows, column, other) + (blackwell if name == POOLED else [])
        error = conformal(errors) if errors else math.log(2)
        least = LEAST_ERROR_OF_A_NEW_GPU if name == POOLED else 0.0
        found[name] = Residual(rows=0, relative_error=max(error, least))
    return base.model_copy(update={"residuals": found})


def fit_shipped() -> Calibration:
    """Fit the calibration that ships, but for its source and date."""
    gpus = gpu_table()
    nvidia = read_runs(NVIDIA, gpus)
    fitted = fit([*read_runs(RUNS, gpus), *learned_runs(gpus)], nvidia)
    return add_processors(nvidia, add_framework(read_runs(MANY_NODES, gpus), fitted))


def _suite(row: MeasuredRun) -> str:
    """The suite of a row; all rounds of MLPerf are one, and all releases of Bridge."""
    return next((name for name in ("mlperf", "bridge") if row.suite.startswith(name)), row.suite)


def _of_processors(rows: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs that show a processor's numbers: dense decoders and adapters."""
    return [row for row in rows if not row.setup.model.experts and row.setup.model.architecture == "decoder"]


def _processor(row: MeasuredRun) -> str:
    return row.setup.hardware.gpu.die


def _framework(row: MeasuredRun) -> str:
    return row.setup.recipe.framework


def _left_out_group_errors(
    rows: Sequence[MeasuredRun], column: Callable[[MeasuredRun], str], other: Callable[[MeasuredRun], str]
) -> list[tuple[str, float]]:
    """List (value, log error) of the rows of each value of ``column``, by a fit to the rest with their ``other``."""
    errors: list[tuple[str, float]] = []
    for value in sorted({column(row) for row in rows}):
        rest = [row for row in rows if column(row) != value]
        known = {other(row) for row in rest}
        if left := [row for row in rows if column(row) == value and other(row) in known]:
            errors += [(value, float(error)) for error in log_errors(left, fit_rows(rest))]
    return errors


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
