"""Measured runs: read the rows of a table or of a stack, and predict them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from bootstrap.contract.measured import MeasuredRow
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.hardware import Gpu, InstanceType
from optimizer.performance.calibration import Calibration, Coefficients
from optimizer.performance.case import Case
from optimizer.performance.operations import model_flops_per_sample
from optimizer.performance.rows import Real, Row, read_row
from optimizer.performance.table import StepTable, stack, step_seconds
from optimizer.performance.types import Floats

RUNS = Path(__file__).parent / "data" / "measured_runs.csv"
# Columns that no estimate reads.
DESCRIPTIVE_COLUMNS = ("row_id", "suite", "source", "memory_kind", "reserved_memory_gib")
Measurement = Annotated[Real, Field(ge=1e-9)]  # 0 is none
# Least MFU of a run of a few tokens; the lowest of the shipped rows is 1%.
LEAST_MFU = 1e-5


class RunRow(Row):
    """A row with its measurements."""

    tokens_per_second_per_gpu: Measurement
    peak_memory_gib: Measurement | None = None


# Columns of a table of runs, all that are read first.
RUN_COLUMNS = (*RunRow.model_fields, *DESCRIPTIVE_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A set-up with its measured throughput and peak."""

    row_id: str
    suite: str
    setup: Case
    tokens_per_second_per_gpu: float
    peak_memory_gib: float | None
    line: int = 0

    @cached_property
    def table(self) -> StepTable:
        """Table of its step."""
        return StepTable(self.setup)

    @property
    def step_time_s(self) -> float:
        """Measured time of one optimizer step."""
        tokens = float(self.setup.global_batch) * self.setup.recipe.seq_len
        return tokens / (self.tokens_per_second_per_gpu * float(self.setup.gpus))


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A line that no fit can use."""

    line: int
    row_id: str
    reason: str


def usable_runs(
    lines: Iterable[tuple[int, Mapping[str, Any]]], gpus: Mapping[str, Gpu]
) -> tuple[list[MeasuredRun], list[Refused], list[str]]:
    """Part numbered lines into usable runs and refused lines; also return the filled columns that are never read."""
    rows: list[MeasuredRun] = []
    refused: list[Refused] = []
    filled: dict[str, None] = {}
    for number, cells in lines:
        try:
            row = RunRow.read(cells)
            run = MeasuredRun(
                row_id=cells.get("row_id") or str(number),
                suite=cells.get("suite") or "",
                setup=read_row(row, gpus),
                tokens_per_second_per_gpu=row.tokens_per_second_per_gpu,
                peak_memory_gib=row.peak_memory_gib,
                line=number,
            )
            _check_speed(run)
            rows.append(run)
            filled |= dict.fromkeys(name for name, cell in cells.items() if cell)
        except GpufleetError as error:
            refused.append(Refused(line=number, row_id=cells.get("row_id") or "", reason=str(error)))
    return rows, refused, [name for name in filled if name not in RUN_COLUMNS]


def _check_speed(run: MeasuredRun) -> None:
    """Refuse a speed that no GPU has."""
    case, speed = run.setup, run.tokens_per_second_per_gpu
    share = model_flops_per_sample(case) / case.recipe.seq_len * speed / case.rates.peak
    if not LEAST_MFU <= share <= 1:
        raise InvalidInputError(
            f"tokens_per_second_per_gpu is {speed:g}: {share:.3g} of the "
            f"{case.hardware.gpu.name}'s {case.recipe.precision} peak (limit: {LEAST_MFU:g} to 1); "
            f"is it {'of all GPUs together' if share > 1 else 'a row of this model and GPU'}?"
        )


def log_errors(rows: Sequence[MeasuredRun], calibration: Calibration) -> Floats:
    """Compute log(predicted / measured) step time of each row."""
    table, measured = stack([row.table for row in rows]), np.array([row.step_time_s for row in rows])
    coefficients: Coefficients = stack([row.setup.coefficients(calibration) for row in rows])
    return np.asarray(np.log(sum(step_seconds(table, coefficients).values()) / measured))


def throughput_error(log_error: Floats) -> Floats:
    """Convert log(predicted / measured) step time to the relative error of throughput."""
    return np.asarray(np.exp(-log_error) - 1)


# Columns that may differ between two measurements of one layout.
MEASUREMENTS = (*DESCRIPTIVE_COLUMNS, "tokens_per_second_per_gpu", "peak_memory_gib")


def newest_by_layout(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Keep the newest row of each model, layout and hardware: repeats share most of their error."""
    newest: dict[tuple[tuple[str, Any], ...], MeasuredRow] = {}
    for row in sorted(rows, key=lambda row: row.at):
        key = tuple((name, value) for name, value in row.columns().items() if name not in MEASUREMENTS)
        newest[*key, ("instance_type", row.instance_type)] = row
    return list(newest.values())


def cells_of(row: MeasuredRow, gpus: Mapping[str, Gpu], instance: InstanceType | None) -> dict[str, Any]:
    """Cells of a row of a stack, with the GPU and network of its type where the catalog knows the type."""
    same_name = [gpu for gpu in gpus.values() if gpu.name == row.gpu]
    nearest = min(same_name, key=lambda gpu: abs(gpu.memory_gib - row.gpu_memory_gib), default=None)
    gpu = instance.gpu if instance else nearest
    return row.columns() | {
        "gpu": gpu.key if gpu else row.gpu,
        "network_gbit_per_s_per_node": instance.network_gbit_per_s if instance else None,
    }
