"""``SearchSpace``: the layouts of several machines in one table.

A row is an index in that table, a machine an index in ``machines.instances``. Arrays of settings have the shape
shardings x checkpointings x rows: numpy is fast along the last, long axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.performance.calibration import POOLED, model_kind
from optimizer.performance.evaluate import needed_gib, room_gib, step_s
from optimizer.performance.machines import Machines
from optimizer.performance.types import DDP, Bools, Floats, Hardware, Ints
from optimizer.search import layouts
from optimizer.search.confidence import measured_splits, network_error, unmeasured_parts
from optimizer.search.layouts import LayoutTable
from optimizer.search.problem import Problem
from optimizer.search.tables import join_rows, take_rows

# Levels of ``SearchSpace.confidence``.
CONFIDENCE_LEVELS = 3
# Rows whose memory is computed together: with fewer, numpy's calls dominate; with more, arrays miss the cache.
_ROWS_TOGETHER = 4096
_PIPELINE = 1 << layouts.SPLITS.index("pipeline")  # of LayoutTable.splits


class RowMemory(NamedTuple):
    """Memory of rows: peak of each setting at p95, infinite where there is nothing to shard, and NCCL's buffers."""

    p95_gib: Floats
    nccl_gib: Floats


class EvaluatedSettings(NamedTuple):
    """Settings of one machine, rows x shardings x checkpointings; infinite hours where there is nothing to shard."""

    hours: Floats
    p95_gib: Floats
    limit_gib: Floats


class SearchSpace:
    """Rows of several machines.

    Attributes:
        table, tables, table_rows: the distinct layout tables joined, as views of that, and their rows in it.
        table_index, machine_rows: of each machine, its table and that table's rows.
        settings, splits: of each row, number of legal settings, and bits of its splits.
        steps: optimizer steps of the run.
        measured: of each machine, true where runs on its GPU were measured.
        unmeasured: of each machine, bits of the splits without a measured run.
        machine_slots: slots of one machine, node counts from 0 times the levels of confidence.
    """

    def __init__(self, problem: Problem, instances: Sequence[InstanceType], tables: Sequence[LayoutTable]) -> None:
        recipe, calibration, self.model = problem.recipe, problem.calibration, problem.model
        self.gradient_compression = recipe.gradient_compression
        self.machines = Machines.build(instances, recipe, self.model, calibration)
        distinct = list({id(table): table for table in tables}.values())
        self.table_index = [next(i for i, one in enumerate(distinct) if one is table) for table in tables]
        self.table = join_rows(distinct)
        ends = np.cumsum([0, *(table.size for table in distinct)]).tolist()
        self.table_rows = [slice(start, end) for start, end in pairwise(ends)]
        self.tables = [take_rows(self.table, rows) for rows in self.table_rows]
        self.machine_rows = [self.table_rows[i] for i in self.table_index]
        self.shardings = layouts.allowed_shardings(recipe)
        self.checkpointings = layouts.allowed_checkpointings(self.model)
        # One rank has nothing to shard its states over, and reduces no gradients.
        self._reduces = self.table.data * self.table.context > 1
        self.can_shard = self._reduces | (self.shardings == DDP)[:, None, None]
        self.settings = np.count_nonzero(self.can_shard, axis=(0, 1)) * self.checkpointings.size
        self.steps = problem.amount.steps
        self.splits = self.table.splits
        kind, self._pooled_error = model_kind(self.model), calibration.residuals[POOLED].relative_error
        residuals, of_pipelines = (
            [
                calibration.residual(i.gpu, recipe.precision, recipe.framework, kind=kind, pipelines=pipelines)
                for i in self.machines.instances
            ]
            for pipelines in (False, True)
        )
        self.measured = [residual.rows > 0 for residual in residuals]
        least = self._pooled_error if unmeasured_parts(recipe, self.model, "none") else 0.0
        self._errors, self._pipeline_errors = (
            np.maximum([residual.relative_error for residual in some], least) for some in (residuals, of_pipelines)
        )
        # Network error of each machine, for the estimates of several nodes.
        self._network_errors = np.array(
            [network_error(Hardware.from_instance_type(i), nodes=2) for i in self.machines.instances]
        )
        measured = [
            sum((name in measured_splits(i.gpu, recipe.framework)) << bit for bit, name in enumerate(layouts.SPLITS))
            for i in self.machines.instances
        ]
        # None where the GPU is no better known than the pooled runs.
        self.unmeasured = ~np.where(self._errors < self._pooled_error, measured, -1)
        self.machine_slots = (int(self.table.nodes.max()) + 1) * CONFIDENCE_LEVELS

    def confidence(self, machine: Ints | int, row: Ints | slice) -> Ints:
        """0 for data parallelism alone, 1 for measured splits only, 2 with an unmeasured split."""
        splits = self.splits[row]
        return np.where(splits == 0, 0, 1 + ((splits & self.unmeasured[machine]) != 0))

    def slot(self, machine: Ints | int, row: Ints | slice) -> Ints:
        """Number of the (machine, node count, confidence) that a row competes for."""
        confidence = self.confidence(machine, row)
        return machine * self.machine_slots + self.table.nodes[row] * CONFIDENCE_LEVELS + confidence

    def relative_error(self, machine: Ints, row: Ints) -> Floats:
        """Error of the estimates."""
        several, stages = self.table.nodes[row] > 1, (self.splits[row] & _PIPELINE) > 0
        error = np.where(several & stages, self._pipeline_errors[machine], self._errors[machine])
        unmeasured = self.confidence(machine, row) == 2
        if self.gradient_compression != "none":
            unmeasured |= self._reduces[row]
        error = np.maximum(error, np.where(unmeasured, self._pooled_error, 0.0))
        return np.maximum(error, np.where(several, self._network_errors[machine], 0.0))

    def columns(self, row: Ints) -> dict[str, Any]:
        """Fields of Grid, without sharding and checkpointing."""
        return {name: getattr(self.table, name)[row].astype(float) for name in layouts.GRID_COLUMNS}

    def memory(self, row: Ints, **columns: Floats) -> RowMemory:
        """Memory that rows need in each setting, with ``columns`` in place of their own."""
        p95_gib = np.empty((self.shardings.size, self.checkpointings.size, row.size))
        nccl_gib = np.empty(row.size)
        table = self.table
        for start in range(0, row.size, _ROWS_TOGETHER):
            piece = slice(start, start + _ROWS_TOGETHER)
            rows = row[piece]
            ranks = table.data[rows] * table.tensor[rows] * table.pipeline[rows] * table.context[rows]
            grid = self._grid(rows) | {name: values[piece] for name, values in columns.items()}
            p95, nccl_gib[piece] = needed_gib(self.machines.inputs_without_gpu(ranks / table.nodes[rows], grid))
            p95_gib[:, :, piece] = np.where(self.can_shard[:, :, rows], p95, np.inf)
        return RowMemory(p95_gib, nccl_gib)

    def least_memory(self, row: Ints) -> RowMemory:
        """Lower bound of the memory of layouts, given their first rows."""
        # A larger micro-batch has fewer in flight, of more samples each.
        accum = np.where(self.table.pipeline[row] > 1, self.table.grad_accum[row], 1)
        return self.memory(row, grad_accum=accum.astype(float))

    def first_fitting(self, fits: Bools) -> Ints:
        """First checkpointing that fits and so the fastest, shardings x rows; the number of them where none fits."""
        first = np.full((fits.shape[0], fits.shape[2]), self.checkpointings.size)
        for index in range(self.checkpointings.size)[::-1]:
            first[fits[:, index]] = index
        return first

    def evaluate_all(self) -> EvaluatedSettings:
        """Evaluate every setting of a space with one machine."""
        row = np.arange(self.table.size)
        inputs = self.machines.inputs(np.zeros_like(row), self._grid(row))
        shape = (self.shardings.size, self.checkpointings.size, row.size)
        hours = np.where(self.can_shard, self.steps * step_s(inputs) / 3600, np.inf)
        parts = (hours, *room_gib(inputs))
        return EvaluatedSettings(*(np.moveaxis(np.broadcast_to(values, shape), -1, 0) for values in parts))

    def _grid(self, row: Ints) -> dict[str, Any]:
        return self.columns(row) | {
            "sharding": self.shardings[:, None, None].astype(float),
            "checkpointing": self.checkpointings[:, None].astype(float),
        }
