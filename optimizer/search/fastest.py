"""The fastest configurations that fit, at every node count of every instance type: all that fit are evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import Parallelism
from optimizer.contract.units import GIB
from optimizer.performance.calibration import POOLED, Coefficients
from optimizer.performance.case import Case
from optimizer.performance.confidence import SPLITS, measured_splits, speed_source
from optimizer.performance.frameworks import MEGATRON
from optimizer.performance.memory import limit_bytes, memory
from optimizer.performance.table import StepTable, estimate_case, stack, step_seconds
from optimizer.performance.types import (
    CHECKPOINTINGS,
    DDP,
    SHARDINGS,
    ZERO1,
    Bools,
    Estimates,
    Floats,
    Grid,
    Hardware,
    Ints,
)
from optimizer.search.layouts import Layouts, build_layouts, describe_layout, split_bits
from optimizer.search.problem import Problem, Rejection

# Share within which hours of one fleet, and scores of a ranking, are the same: the simpler wins.
SAME = 0.01
# Configurations whose intermediate arrays stay in the processor's cache.
CHUNK = 8192
_PIPELINE = 1 << SPLITS.index("pipeline")  # of split_bits


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """The fastest configurations of one type that fit: arrays over them.

    A node count has up to two: the fastest of measured splits, and of all splits, where that is faster.

    Attributes:
        columns: fields of Grid by name.
        relative_error: of the estimates, standard deviation of the log.
        configurations: number of legal configurations; all that fit were evaluated.
    """

    instance: InstanceType
    columns: Layouts
    relative_error: Floats
    train_hours: Floats
    configurations: int

    @property
    def nodes(self) -> Ints:
        """Node count of each configuration."""
        return self.columns["nodes"]

    def parallelism(self, index: int) -> Parallelism:
        """One configuration, as a plan has it."""
        row: dict[str, Any] = {name: int(values[index]) for name, values in self.columns.items() if name != "nodes"}
        row["sharding"] = SHARDINGS[row["sharding"]]
        row["activation_checkpointing"] = CHECKPOINTINGS[row.pop("checkpointing")]
        return Parallelism.model_validate(row)


class _Machine(NamedTuple):
    """A type as the estimator has it: a case to move to other layouts, and the fitted coefficients of its GPU."""

    hardware: Hardware
    case: Case
    coefficients: Coefficients


def _read_machines(problem: Problem, instances: Iterable[InstanceType]) -> list[_Machine]:
    return [
        _Machine(
            node,
            Case(problem.model, problem.recipe, node, Grid(nodes=1, data=1)),
            problem.calibration.coefficients(node.gpu, problem.recipe),
        )
        for node in map(Hardware.from_instance_type, instances)
    ]


def allowed_shardings(framework: str, asked: Sequence[str]) -> Ints:
    """Shardings that the framework has and the request allows, as in Grid; InvalidInputError where there is none."""
    # Megatron's distributed optimizer is ZeRO-1 (https://github.com/NVIDIA/Megatron-LM
    # docs/source/api-guide/dist_optimizer.md).
    supported = (DDP, ZERO1) if framework in MEGATRON else range(len(SHARDINGS))
    allowed = [sharding for sharding in supported if SHARDINGS[sharding] in asked]
    if not allowed:
        raise InvalidInputError(
            f"sharding is {', '.join(asked)}",
            limit=f"{framework} has {', '.join(SHARDINGS[sharding] for sharding in supported)}",
            next_step="leave --sharding out, or choose another --framework",
        )
    return np.array(allowed)


class SearchSpace:
    """Every configuration of instance types that share one table of layouts.

    A row is an index in the table, a machine an index in the instances. Arrays of settings have the shape shardings x
    checkpointings x rows: numpy is fast along the last, long axis.

    Attributes:
        splits: of each row, bits of its splits.
        can_shard: false for settings of one rank, which has nothing to shard its states over.
        configurations: number of legal settings.
        p95_gib, nccl_gib: memory at p95 of each setting, infinite where it cannot shard, and NCCL's of each row.
    """

    def __init__(self, problem: Problem, instances: Sequence[InstanceType], table: Layouts) -> None:
        recipe, calibration, model = problem.recipe, problem.calibration, problem.model
        self.table, self.splits = table, split_bits(table)
        self.shardings = allowed_shardings(recipe.framework, problem.reach.shardings)
        # The least recomputation first.
        self.checkpointings = np.array([CHECKPOINTINGS.index(name) for name in model.checkpointings])
        self.can_shard = (table["data"] * table["context"] > 1) | (self.shardings == DDP)[:, None, None]
        self.configurations = int(np.count_nonzero(self.can_shard)) * self.checkpointings.size
        self._steps = problem.amount.steps
        self._machines = _read_machines(problem, instances)
        # Memory depends on the GPU by a workspace alone, so the machine with the largest stands for all.
        case = max((machine.case for machine in self._machines), key=lambda case: case.rates.product_workspace)
        size = self.splits.size
        self.p95_gib = np.empty((self.shardings.size, self.checkpointings.size, size))
        self.nccl_gib = np.empty(size)
        settings: dict[str, Any] = {
            "sharding": self.shardings[:, None, None].astype(float),
            "checkpointing": self.checkpointings[:, None].astype(float),
        }
        for start in range(0, size, CHUNK):
            row = np.arange(start, min(start + CHUNK, size))
            held = memory(case.moved(**self._columns(row), **settings))
            self.nccl_gib[row] = held.nccl / GIB
            self.p95_gib[..., row] = np.where(self.can_shard[..., row], held.p95 / GIB, np.inf)
        # Errors of each machine on one node, on several, and with a pipeline over several; bits of unmeasured splits.
        self._errors: Floats = np.array(
            [
                [
                    speed_source(calibration, model, recipe, machine.hardware, nodes, splits)[0].relative_error
                    for nodes, splits in ((1, ()), (2, ()), (2, ("pipeline",)))
                ]
                for machine in self._machines
            ]
        )
        self._pooled_error = calibration.residuals[POOLED].relative_error
        self._unmeasured: Ints = ~np.array(
            [
                sum((name in measured_splits(i.gpu, recipe.framework)) << bit for bit, name in enumerate(SPLITS))
                for i in instances
            ]
        )

    def _columns(self, row: Ints) -> dict[str, Any]:
        return {name: values[row].astype(float) for name, values in self.table.items()}

    def limit_gib(self, machine: int) -> Floats:
        """Memory that each row may have."""
        return np.asarray(limit_bytes(self._machines[machine].case.rates.gpu_memory_bytes, self.nccl_gib * GIB) / GIB)

    def find_fastest(self, machine: int, instance: InstanceType) -> Fastest:
        """Evaluate all that fits on a machine; pick the simplest of the fastest of each node count, measured or not.

        An unmeasured split must beat what is measured by more than SAME.
        """
        fits = self.p95_gib <= self.limit_gib(machine)
        of_sharding, row = np.nonzero(fits.any(axis=1))
        sharding = self.shardings[of_sharding]
        # The first checkpointing that fits recomputes least, and so is the fastest.
        checkpointing = self.checkpointings[fits.argmax(axis=1)[of_sharding, row]]
        hours = np.empty(row.size)
        for start in range(0, row.size, CHUNK):
            piece = slice(start, start + CHUNK)
            columns = self._columns(row[piece])
            columns |= {"sharding": sharding[piece].astype(float), "checkpointing": checkpointing[piece].astype(float)}
            case = self._machines[machine].case.moved(**columns)
            parts_s = step_seconds(StepTable(case), self._machines[machine].coefficients)
            hours[piece] = self._steps * np.asarray(sum(parts_s.values())) / 3600
        slot = self.table["nodes"][row] * 2 + self.is_unmeasured(machine, row)
        best = np.full((int(self.table["nodes"].max()) + 1, 2), np.inf)
        np.minimum.at(best.ravel(), slot, hours)
        np.minimum.accumulate(best, axis=1, out=best)
        limits = (1 + SAME) * best
        limits[:, 1:][best[:, :-1] <= limits[:, 1:]] = -np.inf
        tied = np.flatnonzero(hours <= limits.ravel()[slot])
        complexity: Any = (
            row,
            hours,
            self.table["grad_accum"][row],
            checkpointing,
            sharding,
            self.table["virtual_stages"][row],
            np.bitwise_count(self.splits[row]),
            slot,
        )
        order = tied[np.lexsort([column[tied] for column in complexity])]
        chosen = order[np.diff(slot[order], prepend=-1) > 0]
        return Fastest(
            instance=instance,
            columns={name: values[row[chosen]] for name, values in self.table.items()}
            | {"sharding": sharding[chosen], "checkpointing": checkpointing[chosen]},
            relative_error=self.relative_error(machine, row[chosen]),
            train_hours=hours[chosen],
            configurations=self.configurations,
        )

    def is_unmeasured(self, machine: int, row: Ints) -> Bools:
        """Flag rows with a split that no measured run has."""
        return np.asarray(self.splits[row] & self._unmeasured[machine] != 0)

    def relative_error(self, machine: int, row: Ints) -> Floats:
        """Error of the estimates."""
        several, stages = self.table["nodes"][row] > 1, (self.splits[row] & _PIPELINE) > 0
        least = np.where(self.is_unmeasured(machine, row), self._pooled_error, 0.0)
        return np.asarray(np.maximum(self._errors[machine][several * (1 + stages)], least))


def find_fastest(problem: Problem, instances: Sequence[InstanceType]) -> list[Fastest | Rejection]:
    """Find the fastest configurations that fit of each type, or why there is none."""
    recipe, max_nodes = problem.recipe, problem.request.constraints.max_nodes
    results: dict[str, Fastest | Rejection] = {}
    # Types of one shape (ranks of a node, most nodes) share a table of layouts.
    by_shape: dict[tuple[int, int], list[InstanceType]] = {}
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
        by_shape.setdefault(shape, []).append(instance)
    for (ranks, most), alike in by_shape.items():
        table = build_layouts(problem, ranks=ranks, nodes=range(1, most + 1))
        if not table["nodes"].size:
            batch = problem.amount.global_batch
            reason = f"a global batch of {batch} cannot be split evenly over {counted(ranks, 'GPU')} a node"
            for instance in alike:
                results[instance.name] = Rejection(instance.name, reason, "global_batch", batch, ranks)
            continue
        space = SearchSpace(problem, alike, table)
        for machine, instance in enumerate(alike):
            fastest = space.find_fastest(machine, instance)
            results[instance.name] = fastest if fastest.nodes.size else _reject_memory(space, machine, instance)
    return [results[instance.name] for instance in instances]


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
    names = chosen[0][0].columns
    columns: dict[str, Any] = {name: np.array([f.columns[name][i] for f, i in chosen], float) for name in names}
    machines = dict(zip(types, _read_machines(problem, types.values()), strict=True))
    of_each = [machines[fastest.instance.name] for fastest, _ in chosen]
    case = of_each[0].case.moved(rates=stack([machine.case.rates for machine in of_each]), **columns)
    return estimate_case(case, stack([machine.coefficients for machine in of_each]))
