"""Measured runs: read the rows of a table, and predict them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.hardware import Gpu
from optimizer.performance.calibration import Calibration, Coefficients
from optimizer.performance.rows import Row, read_row, read_table
from optimizer.performance.setups import Setup
from optimizer.performance.table import StepTable, build_table, estimate_case, join_estimates, stack, step_seconds
from optimizer.performance.types import Estimates, Floats

RUNS = Path(__file__).parent / "data" / "measured_runs.csv"
# Runs of nanotron on 1 to 32 nodes, whose numbers are added on top.
MANY_NODES = RUNS.with_name("many_nodes_runs.csv")
# Mixtures and adapters in NVIDIA's code, and its dense models on Blackwell: what they show is added on top.
NVIDIA = RUNS.with_name("nvidia_runs.csv")
# Published runs: the shipped calibration is fitted to suite LEARNED too, all others judge it (data/PROVENANCE.md).
PUBLIC = RUNS.with_name("public_runs.csv")
LEARNED = "dgxc-llama"

# Columns that no estimate reads.
DESCRIPTIVE_COLUMNS = ("row_id", "suite", "model", "source", "memory_kind", "reserved_memory_gib")
# Least measured speed and memory; 0 is no measurement.
LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A set-up with its measured throughput and peak."""

    row_id: str
    suite: str
    setup: Setup
    tokens_per_second_per_gpu: float
    peak_memory_gib: float | None
    line: int = 0

    @cached_property
    def table(self) -> StepTable:
        """Table of its step."""
        return build_table(self.setup.case())

    @property
    def step_time_s(self) -> float:
        """Measured time of one optimizer step."""
        grid = self.setup.grid
        samples = float(np.asarray(grid.data) * np.asarray(grid.micro_batch) * np.asarray(grid.grad_accum))
        return samples * self.setup.recipe.seq_len / (self.tokens_per_second_per_gpu * self.setup.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A line that no fit can use."""

    line: int
    row_id: str
    reason: str


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


def read_usable_runs(path: Path, gpus: Mapping[str, Gpu]) -> tuple[list[MeasuredRun], list[Refused], list[str]]:
    """Read the usable runs, the refused lines, and the columns that have values and are never read."""
    return usable_runs(read_table(path)[1], gpus)


def usable_runs(
    lines: Iterable[tuple[int, Mapping[str, Any]]], gpus: Mapping[str, Gpu]
) -> tuple[list[MeasuredRun], list[Refused], list[str]]:
    """Part numbered lines into usable runs and refused lines; also return the filled columns that are never read."""
    rows: list[MeasuredRun] = []
    refused: list[Refused] = []
    filled: dict[str, None] = {}
    read = set(DESCRIPTIVE_COLUMNS)
    for number, cells in lines:
        try:
            row = Row(cells)
            rows.append(_read_run(row, cells, gpus, number))
            filled |= dict.fromkeys(name for name, cell in cells.items() if cell)
            read |= row.read
        except GpufleetError as error:
            refused.append(Refused(line=number, row_id=cells.get("row_id") or "", reason=str(error)))
    return rows, refused, [name for name in filled if name not in read]


def predict(rows: Sequence[MeasuredRun], calibration: Calibration) -> Estimates:
    """Estimate the rows."""
    estimates = [estimate_case(row.setup.case(), row.setup.coefficients(calibration)) for row in rows]
    return join_estimates(estimates)


def stack_tables(rows: Sequence[MeasuredRun]) -> StepTable:
    """Build the tables of the rows as one."""
    table: StepTable = stack([row.table for row in rows])
    return table


def log_errors(rows: Sequence[MeasuredRun], calibration: Calibration, *, new_gpus: bool = False) -> Floats:
    """Compute log(predicted / measured) step time of each row; with ``new_gpus`` of an unknown power limit."""
    table, measured = stack_tables(rows), np.array([row.step_time_s for row in rows])
    if new_gpus:
        table = replace(table, rates=replace(table.rates, throttling=np.zeros(len(rows))))
    coefficients: Coefficients = stack([row.setup.coefficients(calibration) for row in rows])
    return np.asarray(np.log(sum(step_seconds(table, coefficients).values()) / measured))


def throughput_error(log_error: Floats) -> Floats:
    """Convert log(predicted / measured) step time to the relative error of throughput."""
    return np.asarray(np.exp(-log_error) - 1)


def _read_run(row: Row, cells: Mapping[str, Any], gpus: Mapping[str, Gpu], line: int) -> MeasuredRun:
    return MeasuredRun(
        row_id=cells.get("row_id") or str(line),
        suite=cells.get("suite") or "",
        setup=read_row(row, gpus),
        tokens_per_second_per_gpu=row.number("tokens_per_second_per_gpu", least=LEAST),
        peak_memory_gib=row.number("peak_memory_gib", least=LEAST) if row.given("peak_memory_gib") else None,
        line=line,
    )
