"""``FastestSearch``: branch and bound for the fastest configurations of every slot (machine, node count, confidence).

A row is bounded with the checkpointings that memory asks for at its layout's smallest micro-batch; where it may beat
the slot's incumbent, its own memory is computed, and it is bounded again. Rows are evaluated in rounds, least bounds
first, because they lower the incumbents that rule out the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.performance.evaluate import limit_gib, step_s
from optimizer.performance.types import Floats, Ints
from optimizer.search.lower_bound import LowerBound
from optimizer.search.search_space import CONFIDENCE_LEVELS, SearchSpace
from optimizer.search.tables import join_rows, take_rows

# Relative difference of hours below which configurations of one fleet are tied: half the error that the estimate has
# among layouts of one machine (the trainer's ten on two H200, 4.0% on average,
# tests/benchmarks/results/h200_x2_trainer_202611.csv, 2026-11-22).
TIE = 0.02
# With fewer rows, numpy's calls dominate; with more, arrays miss the cache.
_ROWS_TOGETHER = 8192
# A round evaluates bounds within its factor of the slot's least.
_ROUNDS = (1.03, 1.2, np.inf)
_INNER_ROUNDS = (1.03, np.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Configurations:
    """Configurations: indices in the search space, fields of Grid, hours of useful training or their lower bound."""

    machine: Ints
    row: Ints
    slot: Ints
    sharding: Ints
    checkpointing: Ints
    hours: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedRows:
    """Rows with the lower bound of their hours, and the slot for which they compete."""

    machine: Ints
    row: Ints
    slot: Ints
    hours: Floats


class FastestSearch:
    """One search.

    Attributes:
        incumbents: of each slot, hours of the fastest known configuration of its confidence or higher.
        evaluated: of each machine, configurations of weighed rows.
        weighed: machines and rows whose memory was computed.
    """

    def __init__(self, space: SearchSpace) -> None:
        machines = len(space.machines.instances)
        self.space, self.bound = space, LowerBound(space)
        self.incumbents = np.full(machines * space.machine_slots, np.inf)
        self.evaluated = np.zeros(machines, dtype=np.int64)
        self.weighed: list[tuple[Ints, Ints]] = []
        self._fast: list[Configurations] = []

    def run(self) -> Configurations:
        """Search; return a superset of the configurations that tie with an incumbent."""
        rows = [np.flatnonzero(self.space.splits[rows] == 0) + rows.start for rows in self.space.machine_rows]
        self._weigh(np.repeat(np.arange(len(rows)), [row.size for row in rows]), np.concatenate(rows))
        bounded = self.bound_split_rows()
        for index in self._rounds(bounded.slot, bounded.hours, _ROUNDS):
            self._weigh(bounded.machine[index], bounded.row[index])
        none = np.zeros(0, dtype=np.int64)
        empty = Configurations(machine=none, row=none, slot=none, sharding=none, checkpointing=none, hours=np.zeros(0))
        return join_rows([empty, *self._fast])

    def limits(self) -> Floats:
        """Most hours of a configuration of each slot: a tie with the incumbent; finite."""
        return np.minimum((1 + TIE) * self.incumbents, np.finfo(float).max)

    def bound_split_rows(self) -> BoundedRows:
        """Bound all rows that split the model, and keep those that may beat the incumbent."""
        space = self.space
        first_rows = [table.first_rows for table in space.tables]
        memory = space.least_memory(
            np.concatenate([first + rows.start for first, rows in zip(first_rows, space.table_rows, strict=True)])
        )
        ends = np.cumsum([0, *(first.size for first in first_rows)]).tolist()
        fitting: dict[tuple[int, float], tuple[Ints, Ints]] = {}
        slots: dict[tuple[int, int], Ints] = {}
        kept: list[BoundedRows] = []
        limits = self.limits()
        limits[::CONFIDENCE_LEVELS] = -1.0  # data parallelism alone is weighed already
        for machine, rows in enumerate(space.machine_rows):  # a machine at a time stays in the cache
            table, memory_bytes = space.table_index[machine], float(space.machines.memory_bytes[machine])
            layout = space.tables[table].layout
            if (table, memory_bytes) not in fitting:
                own = slice(ends[table], ends[table + 1])
                allowed_gib = limit_gib(memory_bytes, memory.nccl_gib[own])
                first = space.first_fitting(memory.p95_gib[:, :, own] <= allowed_gib)
                fitting[table, memory_bytes] = first, first.min(axis=0)[layout]
            checkpointing, least_checkpointing = fitting[table, memory_bytes]
            # Slots relative to the machine's first are the same for machines with the same measured splits.
            first_slot, unmeasured = machine * space.machine_slots, int(space.unmeasured[machine])
            if (table, unmeasured) not in slots:
                slots[table, unmeasured] = space.slot(machine, rows) - first_slot
            slot = slots[table, unmeasured]
            limit = limits[first_slot : first_slot + space.machine_slots].take(slot)
            near = np.flatnonzero(self.bound.least_hours(machine, rows, least_checkpointing) <= limit)
            hours = self.bound.hours(machine, near + rows.start, checkpointing[:, layout[near]]).min(axis=0)
            may_win = hours <= limit[near]
            near = near[may_win]
            kept.append(
                BoundedRows(
                    machine=np.full(near.size, machine),
                    row=near + rows.start,
                    slot=slot[near] + first_slot,
                    hours=hours[may_win],
                )
            )
        return join_rows(kept)

    def _rounds(self, slot: Ints, bound: Floats, factors: Sequence[float]) -> Iterator[Ints]:
        """Indices of what may still win its slot, round by round."""
        least = np.full(self.incumbents.size, np.inf)
        np.minimum.at(least, slot, bound)
        left = np.arange(slot.size)
        for factor in factors:
            left = left[bound[left] <= self.limits()[slot[left]]]
            now = bound[left] <= factor * least[slot[left]]
            yield left[now]
            left = left[~now]

    def _weigh(self, machine: Ints, row: Ints) -> None:
        if not row.size:
            return
        space = self.space
        self.weighed.append((machine, row))
        self.evaluated += np.bincount(machine, weights=space.settings[row], minlength=self.evaluated.size).astype(int)
        # Memory is computed once for rows that machines share.
        place = np.zeros(space.table.size, dtype=np.int64)
        place[row] = 1
        needed = np.flatnonzero(place)
        place[needed] = np.arange(needed.size)
        memory = space.memory(needed)
        limits = self.limits()
        pieces = []
        for start in range(0, row.size, _ROWS_TOGETHER):
            machines, rows = machine[start : start + _ROWS_TOGETHER], row[start : start + _ROWS_TOGETHER]
            places = place[rows]
            allowed_gib = limit_gib(space.machines.memory_bytes[machines], memory.nccl_gib[places])
            checkpointing = space.first_fitting(memory.p95_gib.take(places, axis=2) <= allowed_gib)
            hours = self.bound.hours(machines, rows, checkpointing)
            slot = space.slot(machines, rows)
            sharding, i = np.nonzero(hours <= limits[slot])
            pieces.append(
                Configurations(
                    machine=machines[i],
                    row=rows[i],
                    slot=slot[i],
                    sharding=space.shardings[sharding],
                    # A row that fits nothing has an infinite bound, above every limit.
                    checkpointing=space.checkpointings[checkpointing[sharding, i]],
                    hours=hours[sharding, i],
                )
            )
        bounded = join_rows(pieces)
        for now in self._rounds(bounded.slot, bounded.hours, _INNER_ROUNDS):
            self._evaluate(take_rows(bounded, now))

    def _evaluate(self, bounded: Configurations) -> None:
        space = self.space
        for start in range(0, bounded.row.size, _ROWS_TOGETHER):
            piece = take_rows(bounded, slice(start, start + _ROWS_TOGETHER))
            columns = space.columns(piece.row)
            columns |= {name: getattr(piece, name).astype(float) for name in ("sharding", "checkpointing")}
            hours = space.steps * step_s(space.machines.inputs(piece.machine, columns)) / 3600
            np.minimum.at(self.incumbents, piece.slot, hours)
            levels = self.incumbents.reshape(-1, CONFIDENCE_LEVELS)
            np.minimum.accumulate(levels, axis=1, out=levels)
            self._fast.append(take_rows(replace(piece, hours=hours), hours <= self.limits()[piece.slot]))
