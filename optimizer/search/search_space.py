"""``SearchSpace``: every configuration of the instance types that share one table of layouts.

A row is an index in the table, a machine an index in ``machines.instances``. Arrays of settings have the shape
shardings x checkpointings x rows: numpy is fast along the last, long axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.performance.calibration import POOLED, model_kind
from optimizer.performance.case import build_case, with_layouts
from optimizer.performance.evaluate import CHUNK, limit_gib, needed_gib, step_s
from optimizer.performance.types import DDP, Floats, Grid, Hardware, Ints, take_rows
from optimizer.search import layouts
from optimizer.search.confidence import measured_splits, network_error, unmeasured_parts
from optimizer.search.layouts import LayoutTable
from optimizer.search.problem import Problem

# Share within which hours of one fleet, and scores of a ranking, are the same: the simpler wins.
SAME = 0.01
# Levels of ``SearchSpace.confidence``.
_LEVELS = 3
_PIPELINE = 1 << layouts.SPLITS.index("pipeline")  # of LayoutTable.splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Configurations:
    """Configurations of one machine: rows of its table, fields of Grid, and hours of useful training."""

    row: Ints
    sharding: Ints
    checkpointing: Ints
    hours: Floats


class SearchSpace:
    """Every configuration of some instance types.

    Attributes:
        splits: of each row, bits of its splits.
        can_shard: false for settings of one rank, which has nothing to shard its states over.
        configurations: number of legal settings.
        p95_gib, nccl_gib: memory at p95 of each setting, infinite where it cannot shard, and NCCL's of each row.
        measured: of each machine, true where runs on its GPU were measured.
    """

    def __init__(self, problem: Problem, instances: Sequence[InstanceType], table: LayoutTable) -> None:
        recipe, calibration, model = problem.recipe, problem.calibration, problem.model
        self.table, self.splits = table, table.splits
        self.gradient_compression = recipe.gradient_compression
        hardware = [Hardware.from_instance_type(instance) for instance in instances]
        self._cases = [build_case(model, recipe, node, Grid(nodes=1, data=1)) for node in hardware]
        self._coefficients = [calibration.coefficients(node.gpu, recipe) for node in hardware]
        self.shardings = layouts.allowed_shardings(recipe)
        self.checkpointings = layouts.allowed_checkpointings(model)
        self._reduces = table.data * table.context > 1
        self.can_shard = self._reduces | (self.shardings == DDP)[:, None, None]
        self.configurations = int(np.count_nonzero(self.can_shard)) * self.checkpointings.size
        self._steps = problem.amount.steps
        self._find_memory()
        kind, self._pooled_error = model_kind(model), calibration.residuals[POOLED].relative_error
        residuals, of_pipelines = (
            [
                calibration.residual(i.gpu, recipe.precision, recipe.framework, kind=kind, pipelines=pipelines)
                for i in instances
            ]
            for pipelines in (False, True)
        )
        self.measured = [residual.rows > 0 for residual in residuals]
        least = self._pooled_error if unmeasured_parts(recipe, model, "none") else 0.0
        self._errors, self._pipeline_errors = (
            np.maximum([residual.relative_error for residual in some], least) for some in (residuals, of_pipelines)
        )
        # Network error of each machine, for the estimates of several nodes.
        self._network_errors: Floats = np.array([network_error(node, nodes=2) for node in hardware])
        measured = [
            sum((name in measured_splits(i.gpu, recipe.framework)) << bit for bit, name in enumerate(layouts.SPLITS))
            for i in instances
        ]
        # Bits of the splits without a measured run: all where the GPU is no better known than the pooled runs.
        self._unmeasured = ~np.where(self._errors < self._pooled_error, measured, -1)

    def _find_memory(self) -> None:
        # Memory depends on no GPU, so the first machine stands for all.
        size = self.table.size
        self.p95_gib = np.empty((self.shardings.size, self.checkpointings.size, size))
        self.nccl_gib = np.empty(size)
        settings = {
            "sharding": self.shardings[:, None, None].astype(float),
            "checkpointing": self.checkpointings[:, None].astype(float),
        }
        for start in range(0, size, CHUNK):
            row = np.arange(start, min(start + CHUNK, size))
            p95_gib, self.nccl_gib[row] = needed_gib(with_layouts(self._cases[0], self._columns(row) | settings))
            self.p95_gib[..., row] = np.where(self.can_shard[..., row], p95_gib, np.inf)

    def _columns(self, row: Ints) -> dict[str, Any]:
        return {name: getattr(self.table, name)[row].astype(float) for name in layouts.GRID_COLUMNS}

    def limit_gib(self, machine: int) -> Floats:
        """Memory that each row may have."""
        return limit_gib(self._cases[machine].rates.gpu_memory_bytes, self.nccl_gib)

    def evaluate(self, machine: int, row: Ints, sharding: Ints, checkpointing: Ints) -> Configurations:
        """Evaluate configurations on one machine; shardings and checkpointings are indices of the space's."""
        sharding, checkpointing = self.shardings[sharding], self.checkpointings[checkpointing]
        hours = np.empty(row.size)
        for start in range(0, row.size, CHUNK):
            piece = slice(start, start + CHUNK)
            columns = self._columns(row[piece])
            columns |= {"sharding": sharding[piece].astype(float), "checkpointing": checkpointing[piece].astype(float)}
            case = with_layouts(self._cases[machine], columns)
            hours[piece] = self._steps * step_s(case, self._coefficients[machine]) / 3600
        return Configurations(row=row, sharding=sharding, checkpointing=checkpointing, hours=hours)

    def find_fastest(self, machine: int) -> Configurations:
        """Evaluate all that fits on a machine; pick the simplest of the fastest of each node count and confidence.

        A lower confidence must beat the higher ones by more than SAME.
        """
        fits = self.p95_gib <= self.limit_gib(machine)
        sharding, row = np.nonzero(fits.any(axis=1))
        # The first checkpointing that fits recomputes least, and so is the fastest.
        every = self.evaluate(machine, row, sharding, fits.argmax(axis=1)[sharding, row])
        slot = self.table.nodes[row] * _LEVELS + self.confidence(machine, row)
        best = np.full((int(self.table.nodes.max()) + 1, _LEVELS), np.inf)
        np.minimum.at(best.ravel(), slot, every.hours)
        np.minimum.accumulate(best, axis=1, out=best)
        limits = (1 + SAME) * best
        limits[:, 1:][best[:, :-1] <= limits[:, 1:]] = -np.inf
        tied = np.flatnonzero(every.hours <= limits.ravel()[slot])
        every, slot = take_rows(every, tied), slot[tied]
        complexity = (
            every.row,
            every.hours,
            self.table.grad_accum[every.row],
            every.checkpointing,
            every.sharding,
            self.table.virtual_stages[every.row],
            np.bitwise_count(self.splits[every.row]),
        )
        order = np.lexsort((*complexity, slot))
        return take_rows(every, order[np.diff(slot[order], prepend=-1) > 0])

    def confidence(self, machine: int, row: Ints) -> Ints:
        """0 for data parallelism alone, 1 for measured splits only, 2 with an unmeasured split."""
        splits = self.splits[row]
        return np.where(splits == 0, 0, 1 + ((splits & self._unmeasured[machine]) != 0))

    def relative_error(self, machine: int, row: Ints) -> Floats:
        """Error of the estimates."""
        several, stages = self.table.nodes[row] > 1, (self.splits[row] & _PIPELINE) > 0
        error = np.where(several & stages, self._pipeline_errors[machine], self._errors[machine])
        unmeasured = self.confidence(machine, row) == 2
        if self.gradient_compression != "none":
            unmeasured |= self._reduces[row]
        error = np.maximum(error, np.where(unmeasured, self._pooled_error, 0.0))
        return np.asarray(np.maximum(error, np.where(several, self._network_errors[machine], 0.0)))
