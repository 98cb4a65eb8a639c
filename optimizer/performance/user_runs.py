"""Calibrate to a user's measured runs, and report how well the result predicts them."""

from __future__ import annotations

import csv
import hashlib
import io
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.contract.measured import MeasuredRow
from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu, InstanceType
from optimizer.performance.adapt import adapt, add_framework, add_processors, residuals
from optimizer.performance.calibration import Calibration, Provenance
from optimizer.performance.fit import fit, fit_rows, left_out_errors
from optimizer.performance.measured_runs import (
    LEARNED,
    MANY_NODES,
    NVIDIA,
    PUBLIC,
    RUNS,
    MeasuredRun,
    Refused,
    learned_runs,
    log_errors,
    predict,
    read_runs,
    read_usable_runs,
)
from optimizer.performance.types import Bools, Floats

LEAST_ALONE = 2
# Least MFU of a run of a few tokens; the lowest of the shipped rows is 1%.
LEAST_MFU = 1e-5


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """A calibration, and one entry a usable row: log(predicted / measured) step time and peak memory.

    Attributes:
        before: errors of the base calibration.
        after, left_out: errors of the new one, and without the row's ``left_out_by``.
        seen_before: the base was fitted to this file, so ``before`` flatters it.
    """

    calibration: Calibration
    rows: list[MeasuredRun]
    refused: list[Refused]
    unread_columns: list[str]
    before: Floats | None
    after: Floats
    left_out: Floats
    left_out_by: str
    peak_memory_gib: Floats
    fits: Bools
    seen_before: bool


def calibrate(
    path: Path,
    gpus: Mapping[str, Gpu],
    base: Calibration | None,
    *,
    as_of: date,
    command: str,
    alone: bool = False,
    origin: str = "",
) -> CalibrationReport:
    """Fit a calibration to the runs of ``path``, from ``base`` or ``alone``; ``origin`` names them, else the file."""
    origin = origin or path.name
    rows, refused, unread = read_usable_runs(path, gpus)
    rows, impossible = _possible(rows, base)
    refused = sorted([*refused, *impossible], key=lambda refusal: refusal.line)
    least = LEAST_ALONE if alone or base is None else 1
    if len(rows) < least:
        first = f"; line {refused[0].line}: {refused[0].reason.splitlines()[0]}" if refused else ""
        raise InvalidInputError(
            f"{origin} holds {counted(len(rows), 'run')} that can be used and {len(refused)} that cannot{first}",
            limit=f"at least {least}",
            why="a fit from nothing needs runs to tell its parts apart" if rows else "",
            next_step="gpufleet calibrate --template prints the columns and an example",
        )
    shipped = path.resolve() == RUNS.resolve()
    published = learned_runs(gpus) if shipped else []
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    suites = ", ".join(sorted({row.suite for row in rows} - {""}))
    count = counted(len(rows), "measured run")
    source = f"{count}{f' of {suites}' if suites else ''} ({origin}, sha256 {digest[:12]})"
    if alone or base is None:
        fitted_to = [*rows, *published]
        if published:
            source += (
                f" and {len(published)} published ones ({PUBLIC.name}, {LEARNED}); Blackwell and L40S: {NVIDIA.name}"
            )
        fitted = fit(fitted_to, source=source, as_of=as_of, command=command)
        if shipped:
            fitted = add_processors(read_runs(NVIDIA, gpus), add_framework(read_runs(MANY_NODES, gpus), fitted))
        left_out = left_out_errors(fitted_to, fit_rows)[: len(rows)]
    else:
        left_out = left_out_errors(rows, lambda train: adapt(train, base))
        update = {
            "residuals": residuals(rows, left_out, base),
            "rows": base.rows + len(rows),
            "source": f"your {source}, on top of {base.source}",
            "as_of": as_of,
            "command": command,
        }
        fitted = adapt(rows, base).model_copy(update=update)
    provenance = Provenance(
        file=origin,
        sha256=digest,
        rows=len(rows),
        refused=len(refused),
        base=None if alone or base is None else f"{base.source}, fitted {base.as_of}",
        versions={name: version(name) for name in ("gpufleet", "numpy")} | {"python": platform.python_version()},
    )
    estimates = predict(rows, fitted)
    models = {(row.suite, row.setup.model.name) for row in rows}
    return CalibrationReport(
        calibration=fitted.model_copy(update={"provenance": provenance}),
        rows=rows,
        refused=refused,
        unread_columns=unread,
        before=None if base is None else log_errors(rows, base),
        after=log_errors(rows, fitted),
        left_out=left_out,
        left_out_by="model" if len(models) > 1 else "run",
        peak_memory_gib=estimates.peak_memory_gib,
        fits=estimates.fits,
        seen_before=base is not None and base.provenance is not None and base.provenance.sha256 == digest,
    )


def _possible(rows: list[MeasuredRun], base: Calibration | None) -> tuple[list[MeasuredRun], list[Refused]]:
    if not rows:
        return [], []
    # MFU x step time does not depend on the calibration.
    estimates = predict(rows, base or fit_rows(rows))
    mfu = estimates.mfu * estimates.step_time_s / np.array([row.step_time_s for row in rows])
    possible, refused = [], []
    for row, share in zip(rows, mfu, strict=True):
        if LEAST_MFU <= share <= 1:
            possible.append(row)
            continue
        reason = (
            f"tokens_per_second_per_gpu is {row.tokens_per_second_per_gpu:g}: {share:.3g} of the "
            f"{row.setup.hardware.gpu.name}'s {row.setup.recipe.precision} peak (limit: {LEAST_MFU:g} to 1); "
            + ("is it of all GPUs together?" if share > 1 else "is it a row of this model and GPU?")
        )
        refused.append(Refused(line=row.line, row_id=row.row_id, reason=reason))
    return possible, refused


# Columns that may differ between two measurements of one layout.
MEASUREMENTS = frozenset(
    ("row_id", "suite", "source", "tokens_per_second_per_gpu", "peak_memory_gib", "reserved_memory_gib")
)


def newest_by_layout(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Keep the newest row of each model, layout and hardware: repeats share most of their error."""
    newest: dict[tuple[tuple[str, Any], ...], MeasuredRow] = {}
    for row in sorted(rows, key=lambda row: row.at):
        key = tuple((name, value) for name, value in row.columns().items() if name not in MEASUREMENTS)
        newest[*key, ("instance_type", row.instance_type)] = row
    return list(newest.values())


def table_text(rows: Iterable[MeasuredRow], gpus: Mapping[str, Gpu], instance_types: Mapping[str, InstanceType]) -> str:
    """Format rows as CSV, with the catalog's GPU and network of their instance type where it knows the type."""
    lines = [_cells(row, gpus, instance_types.get(row.instance_type)) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cells(row: MeasuredRow, gpus: Mapping[str, Gpu], instance: InstanceType | None) -> dict[str, Any]:
    same_name = [gpu for gpu in gpus.values() if gpu.name == row.gpu]
    nearest = min(same_name, key=lambda gpu: abs(gpu.memory_gib - row.gpu_memory_gib), default=None)
    gpu = instance.gpu if instance else nearest
    return row.columns() | {
        "gpu": gpu.key if gpu else row.gpu,
        "network_gbit_per_s_per_node": instance.network_gbit_per_s if instance else None,
    }
