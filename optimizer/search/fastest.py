"""The fastest configuration that fits, for every instance type and node count at once.

For one type and node count, the configuration that trains fastest is best at every price, because a fleet's cost rises
with its hours. All types are searched in flat arrays, and not every configuration is evaluated: a bound (``floor``)
says how fast a row of ``space`` could be at best, and a row that could not be the fastest is left out. The answer is
that of evaluating them all (tests compare it with brute force); ``Fastest`` says how many were evaluated and how many
the bound covered.

A row is bounded first with the checkpointings that memory asks for at its layout's smallest micro-batch; then, where
it may be the fastest, its memory is worked out, and with the checkpointings that this asks for it is bounded again.
What is still fast enough is evaluated, the rows of the least bounds first: they set the mark for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.controller import reserve_hours
from optimizer.hardware import InstanceType
from optimizer.performance.calibration import POOLED, model_kind
from optimizer.performance.evaluate import evaluate_inputs, limit_gib, needed_gib, room_gib, step_s
from optimizer.performance.machines import Machines
from optimizer.performance.types import CHECKPOINTINGS, DDP, SHARDINGS, Estimates, Hardware
from optimizer.plan import Parallelism
from optimizer.search import layouts
from optimizer.search.confidence import measured_splits
from optimizer.search.layouts import LayoutTable
from optimizer.search.lower_bound import COLUMNS, Floor
from optimizer.search.problem import Problem
from optimizer.search.rejections import Rejection, reject_batch, reject_precision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Configurations whose hours differ by less are tied, and the simplest of them is taken (fewest kinds of parallelism,
# virtual stages, sharding, recomputation, passes of a step, in this order): a third of the error of
# the best-measured GPU.
TIE = 0.01
# Rows evaluated together: fewer pay more for numpy's calls, more miss the cache. Memory is worked out of fewer rows, as
# it is of all their shardings and checkpointings.
_CHUNK = 8192
_MEMORY_CHUNK = 4096
# The largest block that glibc's allocator learns from (DEFAULT_MMAP_THRESHOLD_MAX), less what it adds to one.
_LARGE_BYTES = 32 * 2**20 - 2**16
# Rows whose bound is within these factors of the least bound of their type and node count are evaluated first: they set
# the mark that the bounds of the others are held against.
_WAVES = (1.03, 1.2, np.inf)
_INNER_WAVES = (1.03, np.inf)
# Columns of a layout table that are fields of a plan's parallelism.
_LAYOUT = (
    "data",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "sequence_parallel",
    "virtual_stages",
    "micro_batch",
    "grad_accum",
)
# How sure estimates can be (``Search.sureness``).
_LEVELS = 3


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """The fastest configurations that fit at each feasible node count of one type: arrays over them.

    A node count has up to three rows, because their estimates are not equally sure: the fastest of plain data
    parallelism; of the kinds of parallelism that were measured on the GPU, where that is faster; and of all, where
    that is faster still.

    Attributes:
        instance: the type.
        layouts: layout and batch split.
        sharding, checkpointing: as in Grid.
        relative_error: of the estimates, standard deviation of the log.
        steps, train_hours: optimizer steps, and hours of useful training.
        configurations: legal ones, all weighed: evaluated, or left out by the bound.
        evaluated: those of them that were evaluated.
    """

    instance: InstanceType
    layouts: LayoutTable
    sharding: Ints
    checkpointing: Ints
    relative_error: Floats
    steps: Ints
    train_hours: Floats
    configurations: int
    evaluated: int

    @property
    def nodes(self) -> Ints:
        """Node count of each row."""
        return self.layouts.nodes

    @property
    def checkpoint_writers(self) -> Floats:
        """Nodes that write a checkpoint together: those that hold different parts of the state."""
        split = np.minimum(self.layouts.nodes, self.layouts.pipeline)
        return np.where(self.sharding == DDP, split, self.layouts.nodes).astype(float)

    def reserve_hours(self, checkpoint_gib: float) -> Floats:
        """The drain reserve of each configuration, for checkpoints of a size."""
        # As in FleetPlan: one node writes a state that every rank holds whole.
        writers = np.where(self.sharding == DDP, 1, self.nodes)
        return reserve_hours(self.train_hours * 3600 / self.steps, checkpoint_gib, writers)

    def parallelism(self, index: int) -> Parallelism:
        """One configuration, as a plan has it."""
        row = {name: int(getattr(self.layouts, name)[index]) for name in _LAYOUT}
        return Parallelism.model_validate(
            row
            | {
                "sharding": SHARDINGS[self.sharding[index]],
                "activation_checkpointing": CHECKPOINTINGS[self.checkpointing[index]],
            }
        )


def find_fastest(problem: Problem, instances: Sequence[InstanceType]) -> list[Fastest | Rejection]:
    """The fastest configurations that fit, at each node count of each type; or why there is none.

    Args:
        problem: what is trained.
        instances: the types.
    """
    recipe, amount, max_nodes = problem.recipe, problem.amount, problem.request.constraints.max_nodes
    # Until glibc's allocator has had a block of so many bytes back, it returns every large array's pages to the system
    # and faults them in again (https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD).
    np.empty(_LARGE_BYTES, dtype=np.uint8)
    found: dict[str, Fastest | Rejection] = {}
    tables: dict[tuple[int, int], LayoutTable] = {}
    able: dict[Any, list[InstanceType]] = {}
    for instance in instances:
        if recipe.precision not in instance.gpu.peak_tflop_per_s:
            found[instance.name] = reject_precision(instance, recipe.precision)
            continue
        # A fraction of a GPU shares its network and host with strangers: no gang of them.
        shape = (instance.ranks, max_nodes if instance.gpu_count >= 1 else 1)
        if shape not in tables:
            tables[shape] = layouts.build_layouts(problem, ranks=shape[0], nodes=range(1, shape[1] + 1))
        if not tables[shape].size:
            found[instance.name] = reject_batch(instance, amount.largest_batch)
            continue
        # Types of the same GPU, links and network are as fast as each other: host and disks are not in the estimate.
        hardware = Hardware.from_instance_type(instance)
        facts = tuple(getattr(hardware, field.name) for field in fields(Hardware) if field.name != "gpu")
        able.setdefault((instance.gpu.key, shape, *facts), []).append(instance)
    if able:
        first = [same[0] for same in able.values()]
        search = Search(problem, first, [tables[key[1]] for key in able])
        tables.clear()  # the search has copies: their memory is of use to it
        for result, same in zip(search.results(), able.values(), strict=True):
            for at, instance in enumerate(same):
                found[instance.name] = (
                    replace(result, instance=instance, evaluated=0 if at else result.evaluated)
                    if isinstance(result, Fastest)
                    else replace(result, instance_type=instance.name)
                )
    return [found[instance.name] for instance in instances]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entries:
    """Configurations that fit and may be the fastest: arrays of one length; ``hours`` of useful training."""

    machine: Ints
    row: Ints
    sharding: Ints
    checkpointing: Ints
    hours: Floats

    def take(self, at: Any) -> Self:
        """The entries at positions or of a mask."""
        return type(self)(**{field.name: getattr(self, field.name)[at] for field in fields(self)})


class Search:
    """The search over some machines, each with its table of rows; positions in the joined table are ``row``s."""

    def __init__(self, problem: Problem, instances: Sequence[InstanceType], tables: Sequence[LayoutTable]) -> None:
        model, recipe, calibration = problem.model, problem.recipe, problem.calibration
        machines = Machines.build(instances, recipe, model, calibration)
        self.machines, self.model = machines, model
        distinct = list({id(table): table for table in tables}.values())
        self.table_of = [next(at for at, one in enumerate(distinct) if one is table) for table in tables]
        self.table = LayoutTable.joined(distinct)
        ends = np.cumsum([0, *(table.size for table in distinct)]).tolist()
        self.slices_of_tables = [slice(start, end) for start, end in pairwise(ends)]
        self.tables = [self.table.take(rows) for rows in self.slices_of_tables]
        self.slices = [self.slices_of_tables[at] for at in self.table_of]
        self.shardings, self.checkpointings = layouts.allowed_shardings(recipe), layouts.allowed_checkpointings(model)
        # Arrays of shape shardings x checkpointings x rows: numpy is fast along the last, and long, axis.
        self.shards = np.ascontiguousarray(layouts.shards(self.table, self.shardings).T)[:, None]
        self.settings = np.count_nonzero(self.shards, axis=(0, 1)) * self.checkpointings.size
        self.steps = np.ceil(problem.amount.samples / self.table.batch)
        self.used = self.table.used
        self.unsure = calibration.residuals[POOLED].relative_error
        self.errors = np.array(
            [
                calibration.residual(i.gpu, recipe.precision, recipe.framework, kind=model_kind(model)).relative_error
                for i in machines.instances
            ]
        )
        measured = [
            sum((axis in measured_splits(i.gpu, recipe.framework)) << at for at, axis in enumerate(layouts.SPLITS))
            for i in machines.instances
        ]
        self.unmeasured = ~np.where(self.errors < self.unsure, measured, -1)
        # Of each group (``groups``), the hours of the fastest row that is as sure, or surer.
        self.width = int(self.table.nodes.max()) + 1
        self.marks = np.full(len(tables) * self.width * _LEVELS, np.inf)
        self.evaluated = np.zeros(len(tables), dtype=np.int64)
        self.waves: list[tuple[Ints, Ints]] = []
        none = np.zeros(0, dtype=np.int64)
        self.entries = [_Entries(machine=none, row=none, sharding=none, checkpointing=none, hours=np.zeros(0))]

    @cached_property
    def first_rows(self) -> list[Ints]:
        """Of each table, the first row of each layout: that of its smallest micro-batch."""
        found = []
        for table in self.tables:
            first = np.zeros(int(table.layout.max()) + 1, dtype=np.int64)
            first[table.layout[::-1]] = np.arange(table.size)[::-1]
            found.append(first)
        return found

    @cached_property
    def floor(self) -> Floor:
        """The bound of every row."""
        return Floor(
            machines=self.machines,
            tables=self.tables,
            table_of=self.table_of,
            first_rows=self.first_rows,
            steps=self.steps,
            model=self.model,
            shardings=self.shardings,
            checkpointings=self.checkpointings,
        )

    def results(self) -> list[Fastest | Rejection]:
        """One result a machine."""
        plain = [np.flatnonzero(self.used[rows] == 0) + rows.start for rows in self.slices]
        self._weigh(np.repeat(np.arange(len(plain)), [rows.size for rows in plain]), np.concatenate(plain))
        machine, row, group, bound = self.bounded()
        for now in self._waves(group, bound, _WAVES):
            self._weigh(machine[now], row[now])
        return self._found()

    def groups(self, machine: Ints | int, row: Ints | slice) -> Ints:
        """Rows that compete have one number: those of one machine, node count and sureness, in this order."""
        return (machine * self.width + self.table.nodes[row]) * _LEVELS + self.sureness(machine, row)

    def _waves(self, group: Ints, bound: Floats, factors: Sequence[float]) -> Iterator[Ints]:
        """Positions of what is to be evaluated together: what may still be the fastest, the least bounds first."""
        least = np.full(self.marks.size, np.inf)
        np.minimum.at(least, group, bound)
        left = np.arange(group.size)
        for factor in factors:
            left = left[bound[left] <= self._limits()[group[left]]]
            now = bound[left] <= factor * least[group[left]]
            yield left[now]
            left = left[~now]

    def _limits(self) -> Floats:
        """The hours that no row of each group must exceed: a tie with the fastest known that is as sure; finite."""
        return np.minimum((1 + TIE) * self.marks, np.finfo(float).max)

    def bounded(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Machine, row, group and bound of all rows that split the model and may beat the mark.

        A machine at a time stays in the cache.
        """
        starts = [rows.start for rows in self.slices_of_tables]
        first = [of + start for of, start in zip(self.first_rows, starts, strict=True)]
        least_gib, nccl_gib = self._least_gib(np.concatenate(first))
        ends = np.cumsum([0, *(of.size for of in first)]).tolist()
        ways: dict[tuple[int, float], tuple[Ints, Ints]] = {}
        groups: dict[tuple[int, int], Ints] = {}
        found: list[tuple[Ints, Ints, Floats]] = []
        limits = self._limits()
        limits[::_LEVELS] = -1.0  # plain data parallelism is weighed already
        for machine, rows in enumerate(self.slices):
            table, shown_bytes = self.table_of[machine], float(self.machines.memory_bytes[machine])
            if (table, shown_bytes) not in ways:
                mine = slice(ends[table], ends[table + 1])
                way = self._first_that_fits(least_gib[:, :, mine] <= limit_gib(shown_bytes, nccl_gib[mine]))
                ways[table, shown_bytes] = way, way.min(axis=0)[self.tables[table].layout]
            way, least_way = ways[table, shown_bytes]
            # Of machines that the same was measured on, the groups of the same rows are as far apart.
            first_group, unmeasured = machine * self.width * _LEVELS, int(self.unmeasured[machine])
            if (table, unmeasured) not in groups:
                groups[table, unmeasured] = self.groups(machine, rows) - first_group
            group = groups[table, unmeasured]
            limit = limits[first_group : first_group + self.width * _LEVELS].take(group)
            near = np.flatnonzero(self.floor.least_hours(machine, rows, least_way) <= limit)
            bound = self.floor.hours(machine, near + rows.start, way[:, self.tables[table].layout[near]]).min(axis=0)
            may = bound <= limit[near]
            near = near[may]
            found.append((near + rows.start, group[near] + first_group, bound[may]))
        machines = np.repeat(np.arange(len(found)), [row.size for row, _, _ in found])
        row, group, bound = (np.concatenate(column) for column in zip(*found, strict=True))
        return machines, row, group, bound

    def _least_gib(self, row: Ints) -> tuple[Floats, Floats]:
        """What layouts need at least, given their first rows: peak (as of ``_needed_gib``), and NCCL's."""
        # No micro-batch keeps less: a larger one has fewer in flight, of more samples each.
        accum = np.where(self.table.pipeline[row] > 1, self.table.grad_accum[row], 1)
        return self._needed_gib(row, grad_accum=accum.astype(float))

    def _weigh(self, machine: Ints, row: Ints) -> None:
        """Evaluate rows as far as they may be the fastest, and lower the marks."""
        if not row.size:
            return
        self.waves.append((machine, row))
        self.evaluated += np.bincount(machine, weights=self.settings[row], minlength=len(self.slices)).astype(int)
        place = np.zeros(self.table.size, dtype=np.int64)
        place[row] = 1
        needed = np.flatnonzero(place)
        place[needed] = np.arange(needed.size)
        peak_gib, nccl_gib = self._needed_gib(needed)
        shown_bytes = self.machines.memory_bytes
        limits = self._limits()
        pieces = []
        for start in range(0, row.size, _CHUNK):
            of, at = machine[start : start + _CHUNK], row[start : start + _CHUNK]
            where = place[at]
            most_gib = limit_gib(shown_bytes[of], nccl_gib[where])
            way = self._first_that_fits(peak_gib.take(where, axis=2) <= most_gib)
            bound = self.floor.hours(of, at, way)
            group = self.groups(of, at)
            sharding, which = np.nonzero(bound <= limits[group])
            pieces.append((of[which], at[which], group[which], sharding, way[sharding, which], bound[sharding, which]))
        machine, row, group, sharding, way, bound = (np.concatenate(column) for column in zip(*pieces, strict=True))
        for now in self._waves(group, bound, _INNER_WAVES):
            chosen = self.shardings[sharding[now]], self.checkpointings[way[now]]
            self._evaluate(machine[now], row[now], group[now], *chosen)

    def _evaluate(self, machine: Ints, row: Ints, group: Ints, sharding: Ints, checkpointing: Ints) -> None:
        """Work out the hours of configurations that fit, and lower the marks."""
        for start in range(0, row.size, _CHUNK):
            piece = slice(start, start + _CHUNK)
            at = row[piece]
            columns = self._columns(at)
            columns |= {"sharding": sharding[piece].astype(float), "checkpointing": checkpointing[piece].astype(float)}
            hours = self.steps[at] * step_s(self.machines.inputs(machine[piece], columns)) / 3600
            entries = _Entries(
                machine=machine[piece],
                row=at,
                sharding=sharding[piece],
                checkpointing=checkpointing[piece],
                hours=hours,
            )
            np.minimum.at(self.marks, group[piece], hours)
            levels = self.marks.reshape(-1, _LEVELS)
            np.minimum.accumulate(levels, axis=1, out=levels)
            self.entries.append(entries.take(hours <= self._limits()[group[piece]]))

    def _first_that_fits(self, fits: NDArray[np.bool_]) -> Ints:
        """Of each sharding (axis 0) and row (last) the first checkpointing that fits; their number where none does.

        Recomputing more is never faster.
        """
        first = np.full((fits.shape[0], fits.shape[2]), self.checkpointings.size)
        for way in range(self.checkpointings.size)[::-1]:
            first[fits[:, way]] = way
        return first

    def sureness(self, machine: Ints | int, row: Ints | slice) -> Ints:
        """0 for plain data parallelism, 1 for what was measured on the GPU, 2 for what was not: the wider error."""
        used = self.used[row]
        return np.where(used == 0, 0, 1 + ((used & self.unmeasured[machine]) != 0))

    def _needed_gib(self, row: Ints, **columns: Floats) -> tuple[Floats, Floats]:
        """Peak (shardings x checkpointings x rows), infinite where there is nothing to shard, and what NCCL needs."""
        peak_gib = np.empty((self.shardings.size, self.checkpointings.size, row.size))
        nccl_gib = np.empty(row.size)
        table = self.table
        for start in range(0, row.size, _MEMORY_CHUNK):
            piece = slice(start, start + _MEMORY_CHUNK)
            at = row[piece]
            ranks = table.data[at] * table.tensor[at] * table.pipeline[at] * table.context[at] / table.nodes[at]
            settings = self._grid(at) | {name: values[piece] for name, values in columns.items()}
            peak, nccl_gib[piece] = needed_gib(self.machines.inputs_without_gpu(ranks, settings))
            peak_gib[:, :, piece] = np.where(self.shards[:, :, at], peak, np.inf)
        return peak_gib, nccl_gib

    def _columns(self, row: Ints) -> dict[str, Any]:
        return {name: getattr(self.table, name)[row].astype(float) for name in COLUMNS}

    def _grid(self, row: Ints) -> dict[str, Any]:
        """Fields of Grid, of shape shardings x checkpointings x rows."""
        return self._columns(row) | {
            "sharding": self.shardings[:, None, None].astype(float),
            "checkpointing": self.checkpointings[:, None].astype(float),
        }

    def everything(self) -> tuple[Floats, Floats, Floats]:
        """Hours, peak and limit (GiB) of every configuration of one machine: rows x shardings x checkpointings.

        Hours are infinite where there is nothing to shard.
        """
        row = np.arange(self.table.size)
        x = self.machines.inputs(np.zeros_like(row), self._grid(row))
        shape = (self.shardings.size, self.checkpointings.size, row.size)
        hours = np.where(self.shards, self.steps * step_s(x) / 3600, np.inf)
        found = [np.moveaxis(np.broadcast_to(values, shape), -1, 0) for values in (hours, *room_gib(x))]
        return found[0], found[1], found[2]

    def of_rows(self, row: Ints, sharding: Ints, checkpointing: Ints, hours: Floats) -> Fastest:
        """Configurations of one machine, chosen by the caller: positions of rows, shardings and checkpointings."""
        sure = self.sureness(np.zeros_like(row), row) < 2
        return Fastest(
            instance=self.machines.instances[0],
            layouts=self.table.take(row),
            sharding=self.shardings[sharding],
            checkpointing=self.checkpointings[checkpointing],
            relative_error=np.where(sure, self.errors[0], self.unsure),
            steps=self.steps[row].astype(np.int64),
            train_hours=hours,
            configurations=row.size,
            evaluated=row.size,
        )

    def _found(self) -> list[Fastest | Rejection]:
        """What was found of each machine."""
        found = self._choose()
        rows, steps = self.table.take(found.row), self.steps[found.row].astype(np.int64)
        sure = self.sureness(found.machine, found.row) < 2
        ends = np.searchsorted(found.machine, np.arange(len(self.slices) + 1)).tolist()
        results: list[Fastest | Rejection] = []
        for at, instance in enumerate(self.machines.instances):
            mine = slice(ends[at], ends[at + 1])
            if mine.start == mine.stop:
                results.append(self._no_room(at))
                continue
            results.append(
                Fastest(
                    instance=instance,
                    layouts=rows.take(mine),
                    sharding=found.sharding[mine],
                    checkpointing=found.checkpointing[mine],
                    relative_error=np.where(sure[mine], self.errors[at], self.unsure),
                    steps=steps[mine],
                    train_hours=found.hours[mine],
                    configurations=int(self.settings[self.slices[at]].sum()),
                    evaluated=int(self.evaluated[at]),
                )
            )
        return results

    def _choose(self) -> _Entries:
        """Of each machine, node count and sureness the simplest of the fastest, where it beats what is more sure."""
        names = [field.name for field in fields(_Entries)]
        found = _Entries(**{n: np.concatenate([getattr(piece, n) for piece in self.entries]) for n in names})
        group = self.groups(found.machine, found.row)
        mark = (1 + TIE) * self.marks[group]
        # By more than a tie: training code has to implement it.
        keep = (found.hours <= mark) & ((group % _LEVELS == 0) | (self.marks[group - 1] > mark))
        found, group = found.take(keep), group[keep]
        simplest = (
            found.row,
            found.hours,
            self.table.grad_accum[found.row],
            found.checkpointing,
            found.sharding,
            self.table.virtual_stages[found.row],
            np.bitwise_count(self.used[found.row]),
        )
        order = np.lexsort((*simplest, group))
        return found.take(order[np.concatenate(([True], np.diff(group[order]) > 0))[: order.size]])

    def _no_room(self, at: int) -> Rejection:
        """Why nothing fits on a machine: the row that comes nearest, of those that were weighed."""
        instance = self.machines.instances[at]
        weighed = np.concatenate([row[machine == at] for machine, row in self.waves])
        peak_gib, nccl_gib = self._needed_gib(weighed)
        most_gib = limit_gib(self.machines.memory_bytes[at], nccl_gib)
        gap = peak_gib - most_gib
        if not np.isfinite(gap).any():
            kinds = ", ".join(SHARDINGS[sharding] for sharding in self.shardings)
            reason = f"one GPU has nothing to shard its state over, and sharding is {kinds}"
            return Rejection(
                instance_type=instance.name,
                reason=reason,
                binding_constraint="sharding",
                value=kinds,
                limit=SHARDINGS[DDP],
            )
        nearest = int(np.flatnonzero((gap == gap.min()).any(axis=(0, 1)))[-1])
        sharding, way = np.unravel_index(int(gap[:, :, nearest].argmin()), gap.shape[:2])
        needs, leaves = float(peak_gib[sharding, way, nearest]), float(most_gib[nearest])
        layout = described(self.table.take(weighed[[nearest]]), SHARDINGS[self.shardings[sharding]])
        return Rejection(
            instance_type=instance.name,
            reason=f"the smallest step needs {needs:.1f} GiB a GPU ({layout}), "
            f"and {instance.gpu.name} leaves {leaves:.1f} GiB",
            binding_constraint="memory",
            value=needs,
            limit=leaves,
        )


def estimate_configurations(problem: Problem, chosen: Sequence[tuple[Fastest, int]]) -> Estimates:
    """Estimates of rows of ``Fastest``, one an element of ``chosen``, of which there is one at least."""
    types = list({found.instance.name: found.instance for found, _ in chosen}.values())
    position = {instance.name: at for at, instance in enumerate(types)}
    columns = {name: np.array([getattr(found.layouts, name)[at] for found, at in chosen], float) for name in COLUMNS}
    for name in ("sharding", "checkpointing"):
        columns[name] = np.array([getattr(found, name)[at] for found, at in chosen], float)
    machine = np.array([position[found.instance.name] for found, _ in chosen])
    machines = Machines.build(types, problem.recipe, problem.model, problem.calibration)
    return evaluate_inputs(machines.inputs(machine, columns))


def described(rows: LayoutTable, sharding: str) -> str:
    """One row in words: "zero3 over 8 GPUs, tensor 2, pipeline 4, micro-batch 1"."""
    ways = {"tensor": rows.tensor, "pipeline": rows.pipeline, "context": rows.context, "expert": rows.expert}
    split = "".join(f", {name} {int(ranks[0])}" for name, ranks in ways.items() if ranks[0] > 1)
    ranks = int(rows.data[0])
    return f"{sharding} over {ranks} GPU{'s' * (ranks > 1)}{split}, micro-batch {int(rows.micro_batch[0])}"
