"""The fastest configurations that fit, at every node count of every instance type: all that fit are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from bootstrap.contract.words import counted
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Parallelism
from optimizer.economics.running_costs import reserve_hours
from optimizer.performance.case import build_case, with_layouts
from optimizer.performance.evaluate import estimate_case
from optimizer.performance.table import stack
from optimizer.performance.types import (
    CHECKPOINTINGS,
    DDP,
    SHARDINGS,
    Estimates,
    Floats,
    Grid,
    Hardware,
    Ints,
    take_rows,
)
from optimizer.search.layouts import GRID_COLUMNS, LayoutTable, build_layouts, describe_layout
from optimizer.search.problem import Problem
from optimizer.search.rejections import Rejection
from optimizer.search.search_space import Configurations, SearchSpace

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
        configurations: number of legal configurations; all that fit were evaluated.
    """

    instance: InstanceType
    layouts: LayoutTable
    sharding: Ints
    checkpointing: Ints
    measured: bool
    relative_error: Floats
    train_hours: Floats
    configurations: int
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
    recipe, max_nodes = problem.recipe, problem.request.constraints.max_nodes
    results: dict[str, Fastest | Rejection] = {}
    # Types of one shape (ranks of a node, most nodes) share a table of layouts.
    by_shape: dict[tuple[int, int], dict[Any, list[InstanceType]]] = {}
    for instance in instances:
        if recipe.precision not in instance.gpu.peak_tflop_per_s:
            known = ", ".join(sorted(instance.gpu.peak_tflop_per_s))
            reason = f"{instance.gpu.name} does not compute in {recipe.precision}"
            results[instance.name] = Rejection(instance.name, reason, "precision", recipe.precision, known)
            continue
        if reason := problem.undriven.get(instance.name, ""):
            asked = f"--instance-type {instance.name.partition('.')[0]}"
            reason += f"; with an image of your own (gpufleet:amiId), {asked} plans it"
            results[instance.name] = Rejection(instance.name, reason, "image", instance.gpu.name, None)
            continue
        # A fraction of a GPU shares its network and host with strangers: no gang of them.
        shape = (instance.ranks, max_nodes if instance.gpu_count >= 1 else 1)
        # Estimates depend on GPU, links and network, not on disks, and on vCPUs only where they prepare samples.
        hardware = Hardware.from_instance_type(instance)
        other = {"gpu"} if recipe.samples_per_vcpu_s else {"gpu", "loader_workers"}
        facts = tuple(getattr(hardware, field.name) for field in fields(Hardware) if field.name not in other)
        by_shape.setdefault(shape, {}).setdefault((instance.gpu.key, facts), []).append(instance)
    for (ranks, most), alike in by_shape.items():
        table = build_layouts(problem, ranks=ranks, nodes=range(1, most + 1))
        groups = list(alike.values())
        if not table.size:
            batch = problem.amount.global_batch
            reason = f"a global batch of {batch} cannot be split evenly over {counted(ranks, 'GPU')} a node"
            for instance in chain.from_iterable(groups):
                results[instance.name] = Rejection(instance.name, reason, "global_batch", batch, ranks)
            continue
        space = SearchSpace(problem, [group[0] for group in groups], table)
        for machine, group in enumerate(groups):
            chosen = space.find_fastest(machine)
            for instance in group:
                if chosen.row.size:
                    results[instance.name] = build_fastest(space, machine, instance, chosen)
                else:
                    results[instance.name] = _reject_memory(space, machine, instance)
    return [results[instance.name] for instance in instances]


def build_fastest(space: SearchSpace, machine: int, instance: InstanceType, chosen: Configurations) -> Fastest:
    """Build the ``Fastest`` of a type from configurations of its machine."""
    return Fastest(
        instance=instance,
        layouts=take_rows(space.table, chosen.row),
        sharding=chosen.sharding,
        checkpointing=chosen.checkpointing,
        measured=space.measured[machine],
        relative_error=space.relative_error(machine, chosen.row),
        train_hours=chosen.hours,
        configurations=space.configurations,
        gradient_compression=space.gradient_compression,
    )


def _reject_memory(space: SearchSpace, machine: int, instance: InstanceType) -> Rejection:
    """Reject a type on whose machine nothing fits: name the layout that comes nearest."""
    allowed_gib = space.limit_gib(machine)
    lack_gib = space.p95_gib - allowed_gib
    if not np.isfinite(lack_gib).any():
        shardings = ", ".join(SHARDINGS[sharding] for sharding in space.shardings)
        reason = f"one GPU has nothing to shard its state over, and sharding is {shardings}"
        return Rejection(instance.name, reason, "sharding", shardings, SHARDINGS[DDP])
    nearest = int(np.flatnonzero((lack_gib == lack_gib.min()).any(axis=(0, 1)))[-1])
    setting = np.unravel_index(int(lack_gib[:, :, nearest].argmin()), lack_gib.shape[:2])
    needed, allowed = float(space.p95_gib[(*setting, nearest)]), float(allowed_gib[nearest])
    layout = describe_layout(space.table, nearest, SHARDINGS[space.shardings[setting[0]]])
    reason = (
        f"the smallest step needs {needed:.1f} GiB a GPU at the 95th percentile ({layout}), and {instance.gpu.name} "
        f"leaves {allowed:.1f} GiB"
    )
    return Rejection(instance.name, reason, "memory", needed, allowed)


def estimate_configurations(problem: Problem, chosen: Sequence[tuple[Fastest, int]]) -> Estimates:
    """Estimates of at least one configuration, each an index in a ``Fastest``."""
    types = {fastest.instance.name: fastest.instance for fastest, _ in chosen}
    position = {name: i for i, name in enumerate(types)}
    columns = {name: np.array([getattr(f.layouts, name)[i] for f, i in chosen], float) for name in GRID_COLUMNS}
    for name in ("sharding", "checkpointing"):
        columns[name] = np.array([getattr(fastest, name)[i] for fastest, i in chosen], float)
    machine = np.array([position[fastest.instance.name] for fastest, _ in chosen])
    nodes = [Hardware.from_instance_type(instance) for instance in types.values()]
    cases = [build_case(problem.model, problem.recipe, node, Grid(nodes=1, data=1)) for node in nodes]
    coefficients = stack([problem.calibration.coefficients(node.gpu, problem.recipe) for node in nodes])
    case = replace(cases[0], rates=take_rows(stack([case.rates for case in cases]), machine))
    return estimate_case(with_layouts(case, columns), take_rows(coefficients, machine))
