"""The fastest configurations that fit, at every node count of every instance type.

The answer is that of evaluating every configuration: tests compare it with brute force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Parallelism
from optimizer.economics.controller import reserve_hours
from optimizer.performance.evaluate import evaluate_inputs
from optimizer.performance.machines import Machines
from optimizer.performance.types import CHECKPOINTINGS, DDP, SHARDINGS, Estimates, Floats, Hardware, Ints
from optimizer.search.branch_and_bound import TIE, Configurations, FastestSearch
from optimizer.search.layouts import GRID_COLUMNS, LayoutTable, build_layouts
from optimizer.search.problem import Problem
from optimizer.search.rejections import Rejection, reject_batch, reject_memory, reject_precision
from optimizer.search.search_space import CONFIDENCE_LEVELS, SearchSpace
from optimizer.search.tables import take_rows

# Largest block that glibc's allocator learns from (DEFAULT_MMAP_THRESHOLD_MAX), less its header.
_LARGE_BYTES = 32 * 2**20 - 2**16
# Arrays over the configurations beside the layouts.
_ARRAYS = ("sharding", "checkpointing", "relative_error", "train_hours")


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """The fastest configurations of one type that fit: arrays over them.

    A node count has up to three: the fastest of data parallelism alone; of measured splits, where that is faster; and
    of all splits, where that is faster still.

    Attributes:
        measured: runs on this GPU were measured.
        relative_error: of the estimates, standard deviation of the log.
        configurations, evaluated: legal configurations, and those not ruled out by the lower bound.
    """

    instance: InstanceType
    layouts: LayoutTable
    sharding: Ints
    checkpointing: Ints
    measured: bool
    relative_error: Floats
    train_hours: Floats
    configurations: int
    evaluated: int
    gradient_compression: str = "none"

    def only(self, index: int) -> Fastest:
        """Return the one configuration of an index."""
        rows = slice(index, index + 1)
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, layouts=take_rows(self.layouts, rows), **arrays)

    @property
    def nodes(self) -> Ints:
        """Node count of each configuration."""
        return self.layouts.nodes

    @property
    def checkpoint_writers(self) -> Floats:
        """Nodes that write a checkpoint together, each its own part of the state."""
        split = np.minimum(self.layouts.nodes, self.layouts.pipeline)
        return np.where(self.sharding == DDP, split, self.layouts.nodes).astype(float)

    def reserve_hours(self, problem: Problem) -> Floats:
        """The drain reserve of each configuration."""
        # Like FleetPlan: one node writes a state that every rank holds whole.
        writers = np.where(self.sharding == DDP, 1, self.nodes)
        step_s = self.train_hours * 3600 / problem.amount.steps
        return reserve_hours(step_s, problem.checkpoint_gib, writers)

    def parallelism(self, index: int) -> Parallelism:
        """One configuration, as a plan has it."""
        columns = {name: int(getattr(self.layouts, name)[index]) for name in GRID_COLUMNS if name != "nodes"}
        names = {
            "sharding": SHARDINGS[self.sharding[index]],
            "activation_checkpointing": CHECKPOINTINGS[self.checkpointing[index]],
        }
        if columns["data"] * columns["context"] > 1:  # one rank reduces nothing
            names["gradient_compression"] = self.gradient_compression
        return Parallelism.model_validate(columns | names)


def find_fastest(problem: Problem, instances: Sequence[InstanceType]) -> list[Fastest | Rejection]:
    """Find the fastest configurations that fit of each type, or why there is none."""
    # Once freed, this block keeps glibc's allocator from returning each large array's pages to the system and faulting
    # them in again (https://man7.org/linux/man-pages/man3/mallopt.3.html, M_MMAP_THRESHOLD).
    np.empty(_LARGE_BYTES, dtype=np.uint8)
    recipe, max_nodes = problem.recipe, problem.request.constraints.max_nodes
    results: dict[str, Fastest | Rejection] = {}
    tables: dict[tuple[int, int], LayoutTable] = {}
    alike: dict[Any, list[InstanceType]] = {}
    for instance in instances:
        if recipe.precision not in instance.gpu.peak_tflop_per_s:
            results[instance.name] = reject_precision(instance, recipe.precision)
            continue
        # A fraction of a GPU shares its network and host with strangers: no gang of them.
        shape = (instance.ranks, max_nodes if instance.gpu_count >= 1 else 1)
        if shape not in tables:
            tables[shape] = build_layouts(problem, ranks=shape[0], nodes=range(1, shape[1] + 1))
        if not tables[shape].size:
            results[instance.name] = reject_batch(instance, problem.amount.global_batch)
            continue
        # Estimates depend on GPU, links and network, not on disks, and on vCPUs only where they prepare samples.
        hardware = Hardware.from_instance_type(instance)
        other = {"gpu"} if recipe.samples_per_vcpu_s else {"gpu", "loader_workers"}
        facts = (getattr(hardware, field.name) for field in fields(Hardware) if field.name not in other)
        alike.setdefault((instance.gpu.key, shape, *facts), []).append(instance)
    if alike:
        space = SearchSpace(problem, [group[0] for group in alike.values()], [tables[key[1]] for key in alike])
        tables.clear()  # the space has copies; free their memory for the search
        for result, group in zip(_search(space), alike.values(), strict=True):
            for i, instance in enumerate(group):
                if isinstance(result, Fastest):
                    evaluated = 0 if i else result.evaluated
                    results[instance.name] = replace(result, instance=instance, evaluated=evaluated)
                else:
                    results[instance.name] = replace(result, instance_type=instance.name)
    return [results[instance.name] for instance in instances]


def _search(space: SearchSpace) -> list[Fastest | Rejection]:
    search = FastestSearch(space)
    chosen = _choose_simplest(search, search.run())
    ends = np.searchsorted(chosen.machine, np.arange(len(space.machine_rows) + 1)).tolist()
    results: list[Fastest | Rejection] = []
    for machine, rows in enumerate(space.machine_rows):
        own = take_rows(chosen, slice(ends[machine], ends[machine + 1]))
        if own.row.size:
            configurations = int(space.settings[rows].sum())
            results.append(build_fastest(space, own, configurations, int(search.evaluated[machine])))
        else:
            every = np.arange(rows.start, rows.stop)
            weighed = np.concatenate([every[:0], *(row[machines == machine] for machines, row in search.weighed)])
            # No row was weighed where all split the model and the bound of memory refuses each.
            results.append(reject_memory(space, machine, weighed if weighed.size else every))
    return results


def _choose_simplest(search: FastestSearch, configurations: Configurations) -> Configurations:
    """Pick the simplest of the fastest configurations per slot; it must beat higher confidence by more than a tie."""
    space = search.space
    slot = configurations.slot
    limit = (1 + TIE) * search.incumbents[slot]
    surest = slot % CONFIDENCE_LEVELS == 0
    keep = (configurations.hours <= limit) & (surest | (search.incumbents[slot - 1] > limit))
    configurations = take_rows(configurations, keep)
    complexity = (
        configurations.row,
        configurations.hours,
        space.table.grad_accum[configurations.row],
        configurations.checkpointing,
        configurations.sharding,
        space.table.virtual_stages[configurations.row],
        np.bitwise_count(space.splits[configurations.row]),
    )
    order = np.lexsort((*complexity, configurations.slot))
    first = np.concatenate(([True], np.diff(configurations.slot[order]) > 0))[: order.size]
    return take_rows(configurations, order[first])


def build_fastest(space: SearchSpace, chosen: Configurations, configurations: int, evaluated: int) -> Fastest:
    """Build the ``Fastest`` of one machine."""
    return Fastest(
        instance=space.machines.instances[int(chosen.machine[0])],
        layouts=take_rows(space.table, chosen.row),
        sharding=chosen.sharding,
        checkpointing=chosen.checkpointing,
        measured=space.measured[int(chosen.machine[0])],
        relative_error=space.relative_error(chosen.machine, chosen.row),
        train_hours=chosen.hours,
        configurations=configurations,
        evaluated=evaluated,
        gradient_compression=space.gradient_compression,
    )


def estimate_configurations(problem: Problem, chosen: Sequence[tuple[Fastest, int]]) -> Estimates:
    """Estimates of at least one configuration, each an index in a ``Fastest``."""
    types = {fastest.instance.name: fastest.instance for fastest, _ in chosen}
    position = {name: i for i, name in enumerate(types)}
    columns = {name: np.array([getattr(f.layouts, name)[i] for f, i in chosen], float) for name in GRID_COLUMNS}
    for name in ("sharding", "checkpointing"):
        columns[name] = np.array([getattr(fastest, name)[i] for fastest, i in chosen], float)
    machine = np.array([position[fastest.instance.name] for fastest, _ in chosen])
    machines = Machines.build(list(types.values()), problem.recipe, problem.model, problem.calibration)
    return evaluate_inputs(machines.inputs(machine, columns))
