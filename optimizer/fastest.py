"""The fastest configuration that fits, for every instance type and node count at once.

For one type and node count, the configuration that trains fastest is best at every price, because a fleet's cost rises
with its hours. All types are searched in flat arrays, and not every configuration is evaluated: a bound says how fast a
row of ``space`` could be at best, and a row that could not be the fastest is left out. The answer is that of evaluating
them all (tests compare it with brute force); ``Fastest`` says how many were evaluated and how many the bound covered.

The bound of a row has the computation and tensor communication of its layers without more recomputation than memory
asks for, the pipeline's bubble, and the data-parallel communication that computation cannot hide; it leaves out the
optimizer and the host. Computation comes from a table by (machine, tensor, context, expert, micro-batch), of which
there are few; what memory asks for, and communication, from the layout at its smallest micro-batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from optimizer import space
from optimizer.hardware import Gpu, InstanceType, Precision
from optimizer.performance.calibration import POOLED, Calibration, Residual, model_kind
from optimizer.performance.communication import communication
from optimizer.performance.evaluate import evaluate_inputs, inputs_of, limit_gib, needed_gib, room_gib, step_s
from optimizer.performance.frameworks import framework_name, frameworks
from optimizer.performance.inputs import Coefficients, Inputs
from optimizer.performance.step import step_seconds
from optimizer.performance.types import DDP, SHARDINGS, Estimates, Grid, Hardware, Run
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rejection = dict[str, Any]

# Configurations whose hours differ by less are tied, and the simplest of them is taken (fewest kinds of parallelism,
# virtual stages, sharding, recomputation, passes of a step, in this order): a third of the error of
# the best-measured GPU.
TIE = 0.01
# Rows evaluated together, with their shardings and checkpointings: fewer pay more for numpy's calls, more miss the
# cache.
_CHUNK = 4096
# Rows whose bound is within these factors of the least bound of their type and node count are evaluated first: they set
# the mark that the bounds of the others are held against.
_WAVES = (1.03, 1.1, 1.3, np.inf)
# Kinds of parallelism that split the model, by place in a row's bits.
_SPLITS = space.AXES[1:]
# Kinds of parallelism that measured runs on a GPU have (performance/data/measured_runs.csv; a test compares), in code
# with fused kernels (Megatron's) and in plain PyTorch: what one's pipeline costs says little of the other's. With any
# other the speed is as sure as that of a GPU nobody measured.
MEASURED_AXES = {
    ("A100", "fused"): ("tensor", "pipeline"),
    ("H100", "fused"): ("tensor", "pipeline"),
    ("H200", "written out"): ("tensor",),
}
_COLUMNS = tuple(field.name for field in fields(space.Rows) if field.name != "layout")
# Parts of a step that every micro-batch pays in the layers of a stage.
_IN_LAYERS = ("matmul", "attention", "tensor_communication", "context_communication", "expert_communication")


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """The fastest configurations that fit at each feasible node count of one type: arrays over them.

    A node count has up to three rows, because their estimates are not equally sure: the fastest of plain data
    parallelism; of the kinds of parallelism that were measured on the GPU, where that is faster; and of all, where
    that is faster still.

    Attributes:
        instance: the type.
        rows: layout and batch split.
        sharding, checkpointing: as in Grid.
        relative_error: of the estimates, standard deviation of the log.
        steps, train_hours: optimizer steps, and hours of useful training.
        configurations: legal ones, all weighed: evaluated, or left out by the bound.
        evaluated: those of them that were evaluated.
    """

    instance: InstanceType
    rows: space.Rows
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
        return self.rows.nodes

    @property
    def checkpoint_writers(self) -> Floats:
        """Nodes that write a checkpoint together: those that hold different parts of the state."""
        split = np.minimum(self.rows.nodes, self.rows.pipeline)
        return np.where(self.sharding == DDP, split, self.rows.nodes).astype(float)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Instance types as the estimator sees them: one Inputs whose numbers differ by type in ``differing`` only."""

    instances: tuple[InstanceType, ...]
    common: Inputs
    differing: dict[str, Floats]
    coefficients: dict[str, Floats]

    @cached_property
    def memory_bytes(self) -> Floats:
        """What each one's driver shows of a GPU's memory."""
        shown: Any = self.differing.get("gpu_memory_bytes", self.common.gpu_memory_bytes)
        return np.broadcast_to(shown, len(self.instances))

    def any_with(self, gpus_per_node: Floats, columns: Mapping[str, Any]) -> Inputs:
        """Inputs of configurations on no GPU in particular: all that is known of it is how many a node has."""
        numbers: dict[str, Any] = dict.fromkeys(self.differing, np.nan) | {"gpus_per_node": gpus_per_node}
        fitted: dict[str, Any] = dict.fromkeys(self.coefficients, np.nan)
        return replace(self.common, **numbers, **columns, coefficients=replace(self.common.coefficients, **fitted))

    @classmethod
    def of(cls, instances: Sequence[InstanceType], run: Run, model: ModelSpec, calibration: Calibration) -> Self:
        """Look up what the estimator needs of each type.

        Raises:
            DataMissingError: a fact about a GPU is missing.
        """
        one = Grid(nodes=1, data=1, sequence_parallel=0)
        inputs = [inputs_of(model, run, share_of_gpu(instance), one, calibration) for instance in instances]
        grid = {field.name for field in fields(Grid)}
        names = [field.name for field in fields(Inputs) if field.name not in grid | {"coefficients", "module"}]
        return cls(
            instances=tuple(instances),
            common=inputs[0],
            differing=_differing(inputs, names),
            coefficients=_differing([x.coefficients for x in inputs], [field.name for field in fields(Coefficients)]),
        )

    def inputs(self, machine: Ints, columns: Mapping[str, Any], *, axes: int = 0) -> Inputs:
        """Inputs of configurations on ``machine`` (positions in ``instances``, one a configuration).

        Args:
            machine: flat.
            columns: fields of Grid; flat ones of that length, or broadcasting against it.
            axes: dimensions that the flat ones get behind their own.
        """
        more = (..., *(None,) * axes)
        numbers: dict[str, Any] = {name: values[machine][more] for name, values in self.differing.items()}
        return replace(
            self.common,
            **numbers,
            **columns,
            coefficients=replace(
                self.common.coefficients, **{name: values[machine][more] for name, values in self.coefficients.items()}
            ),
        )


def _differing(things: Sequence[Any], names: Collection[str]) -> dict[str, Floats]:
    columns = {name: [getattr(thing, name) for thing in things] for name in names}
    return {name: np.array(values) for name, values in columns.items() if any(v != values[0] for v in values)}


def measured_axes(gpu: Gpu, framework: str) -> tuple[str, ...]:
    """Kinds of parallelism, besides data parallelism, that measured runs on ``gpu`` have in code like ``framework``."""
    fused = frameworks()[framework_name(framework)].fused_kernels
    return MEASURED_AXES.get((gpu.name, "fused" if fused else "written out"), ())


def unmeasured_note(gpu: Gpu, framework: str, ranks: Mapping[str, int]) -> str:
    """What no measured run on ``gpu`` has of a layout (ranks by kind of parallelism), in words; empty if it has all."""
    known = measured_axes(gpu, framework)
    kinds = [axis for axis in _SPLITS if axis not in known and ranks[axis] > 1]
    what = f"{' or '.join(kinds)} parallelism in code like {framework}"
    return f"no measured run on {gpu.name} has {what}" if kinds else ""


def speed_source(
    calibration: Calibration, gpu: Gpu, precision: Precision, framework: str, model: ModelSpec, ranks: Mapping[str, int]
) -> tuple[Residual, str]:
    """How sure the speed of a layout (ranks by kind of parallelism) is, and where it comes from, in words."""
    kind, unsure = model_kind(model), calibration.residuals[POOLED].relative_error
    residual = calibration.residual(gpu, precision, framework, kind=kind)
    source = calibration.describe(gpu, precision, framework, kind=kind)
    note = unmeasured_note(gpu, framework, ranks)
    if note and residual.relative_error < unsure:
        return Residual(rows=residual.rows, relative_error=unsure), f"{source}; {note}, so error {unsure:.0%}"
    return residual, source


def share_of_gpu(instance: InstanceType) -> Hardware:
    """The estimator's view of an instance type; a fractional GPU computes and moves data at its fraction."""
    gpu = instance.gpu
    if instance.gpu_count < 1:
        gpu = replace(
            gpu,
            memory_bandwidth_gb_per_s=gpu.memory_bandwidth_gb_per_s * instance.gpu_count,
            peak_tflop_per_s={name: peak * instance.gpu_count for name, peak in gpu.peak_tflop_per_s.items()},
        )
    return Hardware(
        gpu=gpu,
        gpus_per_node=instance.ranks,
        interconnect=instance.interconnect,
        network_gbit_per_s=instance.network_gbit_per_s,
        efa=instance.efa_cards > 0,
        gpu_memory_gib=instance.gpu_memory_gib,
    )


def fastest(
    instances: Sequence[InstanceType],
    run: Run,
    model: ModelSpec,
    *,
    samples: int,
    global_batch: int | None,
    batch_limit: int,
    max_nodes: int,
    calibration: Calibration,
    axes: Collection[str] = space.AXES,
) -> list[Fastest | Rejection]:
    """The fastest configurations that fit, at each node count up to ``max_nodes`` of each type; or why there is none.

    Args:
        instances: the types.
        run, model: what is trained.
        samples: sequences or images of the whole training.
        global_batch, batch_limit: as ``space.rows`` takes them.
        max_nodes: most nodes.
        calibration: fitted numbers.
        axes: kinds of parallelism that may be used, of ``space.AXES``.
    """
    found: dict[str, Fastest | Rejection] = {}
    tables: dict[tuple[int, int], space.Rows] = {}
    able: dict[Any, list[InstanceType]] = {}
    for instance in instances:
        if run.precision not in instance.gpu.peak_tflop_per_s:
            found[instance.name] = rejection(
                instance.name,
                "precision",
                f"{instance.gpu.name} does not compute in {run.precision}",
                run.precision,
                ", ".join(sorted(instance.gpu.peak_tflop_per_s)),
            )
            continue
        # A fraction of a GPU shares its network and host with strangers: no gang of them.
        shape = (instance.ranks, max_nodes if instance.gpu_count >= 1 else 1)
        if shape not in tables:
            tables[shape] = space.rows(
                model,
                run,
                global_batch=global_batch,
                batch_limit=batch_limit,
                ranks=shape[0],
                max_nodes=shape[1],
                axes=axes,
            )
        if not tables[shape].size:
            batch = global_batch or batch_limit
            found[instance.name] = rejection(
                instance.name,
                "global_batch",
                f"a global batch of {batch} cannot be split evenly over {instance.ranks} GPUs a node",
                batch,
                instance.ranks,
            )
            continue
        # Types of the same GPU, links and network are as fast as each other: host and disks are not in the estimate.
        hardware = share_of_gpu(instance)
        facts = tuple(getattr(hardware, field.name) for field in fields(Hardware) if field.name != "gpu")
        able.setdefault((instance.gpu.key, shape, *facts), []).append(instance)
    if able:
        first = [same[0] for same in able.values()]
        search = Search(
            machines=Machines.of(first, run, model, calibration),
            tables=[tables[key[1]] for key in able],
            model=model,
            run=run,
            samples=samples,
            calibration=calibration,
        )
        for result, same in zip(search.results(), able.values(), strict=True):
            for at, instance in enumerate(same):
                found[instance.name] = (
                    replace(result, instance=instance, evaluated=0 if at else result.evaluated)
                    if isinstance(result, Fastest)
                    else result | {"instance_type": instance.name}
                )
    return [found[instance.name] for instance in instances]


Binding = Literal[
    "memory",
    "precision",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
]


def rejection(name: str, binding: Binding, reason: str, value: Any, limit: Any) -> Rejection:
    """Why a type has no plan: an entry of the answer's ``rejected``."""
    return {"instance_type": name, "reason": reason, "binding_constraint": binding, "value": value, "limit": limit}


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

    def __init__(
        self,
        *,
        machines: Machines,
        tables: Sequence[space.Rows],
        model: ModelSpec,
        run: Run,
        samples: int,
        calibration: Calibration,
    ) -> None:
        self.machines, self.model, self.run, self.samples = machines, model, run, samples
        self.calibration = calibration
        distinct = list({id(table): table for table in tables}.values())
        self.table = space.Rows.joined(distinct)
        layouts = np.cumsum([0, *(int(table.layout.max()) + 1 for table in distinct)])
        self.layout = np.concatenate([t.layout + first for t, first in zip(distinct, layouts, strict=False)])
        self.first_row = np.zeros(layouts[-1], dtype=np.int64)
        self.first_row[self.layout[::-1]] = np.arange(self.layout.size)[::-1]
        starts = dict(zip(map(id, distinct), np.cumsum([0, *(t.size for t in distinct[:-1])]), strict=True))
        self.slices = [slice(starts[id(table)], starts[id(table)] + table.size) for table in tables]
        self.shardings, self.checkpointings = space.shardings(run), space.checkpointings(model)
        self.columns = np.stack([getattr(self.table, name) for name in _COLUMNS]).astype(np.float64)
        # Arrays of shape shardings x checkpointings x rows: numpy is fast along the last, and long, axis.
        self.shards = np.ascontiguousarray(space.shards(self.table, self.shardings).T)[:, None]
        self.possible = np.moveaxis(self.shards, -1, 0)
        self.steps = np.ceil(samples / self.table.batch)
        self.ranks = self.table.data * self.table.tensor * self.table.pipeline * self.table.context // self.table.nodes
        # What each row needs of a GPU's memory, GiB, worked out when it is first asked for (``_know``).
        self.known = np.zeros(self.table.size, dtype=bool)
        self.peak_gib = np.empty((self.shardings.size, self.checkpointings.size, self.table.size))
        self.nccl_gib = np.empty(self.table.size)
        self.axes = self.table.axes
        self.used = np.sum([(getattr(self.table, a) > 1) << i for i, a in enumerate(_SPLITS)], axis=0)
        self.unsure = calibration.residuals[POOLED].relative_error
        self.errors = np.array(
            [
                calibration.residual(i.gpu, run.precision, run.framework, kind=model_kind(model)).relative_error
                for i in machines.instances
            ]
        )
        measured = [
            sum((axis in measured_axes(i.gpu, run.framework)) << at for at, axis in enumerate(_SPLITS))
            for i in machines.instances
        ]
        self.unmeasured = ~np.where(self.errors < self.unsure, measured, -1)
        # Of each machine and node count, the hours of the fastest row of each sureness or a better one.
        self.width = int(self.table.nodes.max()) + 1
        self.marks = np.full((3, len(tables) * self.width), np.inf)
        self.evaluated = np.zeros(len(tables), dtype=np.int64)
        self.entries: list[_Entries] = []
        # Of each machine where nothing fitted yet: the row that came nearest, and the GiB it lacks.
        self.lacks_gib = np.full(len(tables), np.inf)
        self.nearest = np.zeros(len(tables), dtype=np.int64)
        self.floor = _Floor(self)

    def results(self) -> list[Fastest | Rejection]:
        """One result a machine."""
        plain = self.axes == 0
        self._wave(*self._rows_where(lambda _, rows: plain[rows]))
        machine, row = self._rows_where(self._may_beat_the_mark(~plain))
        key = machine * self.width + self.table.nodes[row]
        bound = self._bound(machine, row)
        least = np.full(self.marks.shape[1], np.inf)
        np.minimum.at(least, key, bound)
        for factor in _WAVES:
            open_ = np.isfinite(bound) & (bound <= (1 + TIE) * self.marks[self.sureness(machine, row), key])
            now = open_ & (bound <= factor * least[key])
            self._wave(machine[now], row[now])
            later = open_ & ~now
            machine, row, key, bound = machine[later], row[later], key[later], bound[later]
        self.found = self._choose()
        return [self._result(at) for at in range(len(self.slices))]

    def _rows_where(self, wanted: Callable[[int, slice], NDArray[np.bool_]]) -> tuple[Ints, Ints]:
        """Machine and row of all that are ``wanted`` of a machine's rows: a machine at a time stays in the cache."""
        rows = [s.start + np.flatnonzero(wanted(at, s)) for at, s in enumerate(self.slices)]
        return np.repeat(np.arange(len(rows)), [found.size for found in rows]), np.concatenate(rows)

    def _may_beat_the_mark(self, asked: NDArray[np.bool_]) -> Callable[[int, slice], NDArray[np.bool_]]:
        """Which of ``asked`` could be as fast as the fastest known, whatever their checkpointing."""
        marks = (1 + TIE) * self.marks.reshape(len(self.marks), len(self.slices), self.width)

        def may(machine: int, rows: slice) -> NDArray[np.bool_]:
            mark = marks[self.sureness(machine, rows), machine, self.table.nodes[rows]]
            return np.asarray(asked[rows] & (self.floor.least_hours(machine, rows) <= mark))

        return may

    def _bound(self, machine: Ints, row: Ints) -> Floats:
        """The least hours of rows with what fits at the smallest micro-batch; infinite where nothing does."""
        code = machine * self.first_row.size + self.layout[row]
        asked = np.zeros(len(self.slices) * self.first_row.size, dtype=bool)
        asked[code] = True
        pair = np.flatnonzero(asked)
        place = (np.cumsum(asked) - 1)[code]
        at, layout = np.divmod(pair, self.first_row.size)
        first = self.first_row[layout]
        way = np.zeros(pair.size, dtype=np.int64)
        every, once = (np.empty((self.shardings.size, pair.size)) for _ in range(2))
        always = np.empty(pair.size)

        smallest, at_layout = _distinct(first)
        # No micro-batch keeps less: a larger one has fewer in flight, of more samples each.
        columns = self.columns[:, smallest]
        pipeline, accum = columns[_COLUMNS.index("pipeline")], columns[_COLUMNS.index("grad_accum")]
        columns[_COLUMNS.index("grad_accum")] = np.where(pipeline > 1, accum, 1.0)
        least_gib, nccl_gib = self._needed_gib(smallest, columns)
        shown_bytes = self.machines.memory_bytes

        def fill(piece: slice) -> None:
            x = self._inputs_of(at[piece], self.columns[:, first[piece]])
            sent = communication(replace(x, checkpointing=np.zeros((1, 1))))
            where = at_layout[piece]
            most_gib = limit_gib(shown_bytes[at[piece]], nccl_gib[where])
            fit = (least_gib[:, :, where] <= most_gib) & self.shards[:, :, first[piece]]
            way[piece] = _first(np.any(fit, axis=0))
            every[:, piece] = np.where(fit.any(axis=1), sent.data_per_micro_batch[:, 0], np.inf)
            once[:, piece] = sent.data_per_step[:, 0]
            always[piece] = x.coefficients.exposed_communication

        _each(fill, [slice(start, start + _CHUNK) for start in range(0, pair.size, _CHUNK)])
        bound = np.full(row.size, np.inf)
        key = machine * self.width + self.table.nodes[row]
        asked = np.flatnonzero(way[place] >= 0)
        compute = self.floor.hours(machine[asked], row[asked], way[place[asked]])
        # What computation alone leaves too slow needs no more of a bound.
        slow = compute > (1 + TIE) * self.marks[self.sureness(machine[asked], row[asked]), key[asked]]
        asked, compute = asked[~slow], compute[~slow]
        row, place = row[asked], place[asked]
        accum, shown = self.table.grad_accum[row], always[place]
        behind = compute * 3600 / self.steps[row] / accum
        exposed = [
            accum * np.maximum(shown * often[place], often[place] - behind)
            + np.maximum(shown * last[place], last[place] - behind)
            for often, last in zip(every, once, strict=True)
        ]
        bound[asked] = compute + self.steps[row] * np.min(exposed, axis=0) / 3600
        return bound

    def _wave(self, machine: Ints, row: Ints) -> None:
        """Evaluate rows, on all processors, and lower the marks."""
        self._know(row)
        pieces = [slice(at, at + _CHUNK) for at in range(0, row.size, _CHUNK)]
        weighed = _each(lambda piece: self._weigh(machine[piece], row[piece]), pieces)
        for entries, (where, nearest, lacks_gib) in weighed:
            self.entries.append(entries)
            least = self.lacks_gib.copy()
            np.minimum.at(least, where, lacks_gib)
            nearer = (lacks_gib == least[where]) & (lacks_gib < self.lacks_gib[where])
            self.nearest[where[nearer]] = nearest[nearer]
            self.lacks_gib = least
            key = entries.machine * self.width + self.table.nodes[entries.row]
            sureness = self.sureness(entries.machine, entries.row)
            for at, marks in enumerate(self.marks):
                np.minimum.at(marks, key[sureness <= at], entries.hours[sureness <= at])
        self.evaluated += np.bincount(machine, weights=self._settings(row), minlength=len(self.slices)).astype(int)

    def sureness(self, machine: Ints | int, row: Ints | slice) -> Ints:
        """0 for plain data parallelism, 1 for what was measured on the GPU, 2 for what was not: the wider error."""
        used = self.used[row]
        return np.where(used == 0, 0, 1 + ((used & self.unmeasured[machine]) != 0))

    def _settings(self, row: Ints | slice) -> Ints:
        """Configurations of each row."""
        return np.asarray(self.possible[row].sum(axis=(1, 2)) * self.checkpointings.size)

    def _weigh(self, machine: Ints, row: Ints) -> tuple[_Entries, tuple[Ints, Ints, Floats]]:
        """The fastest checkpointing that fits of each row and sharding, and what rows that do not fit lack."""
        most_gib = limit_gib(self.machines.memory_bytes[machine], self.nccl_gib[row])
        gap = np.where(self.shards[:, :, row], self.peak_gib[:, :, row] - most_gib, np.inf)
        fit = gap <= 0
        none = ~fit.any(axis=(0, 1))
        lacks = (machine[none], row[none], gap[:, :, none].min(axis=(0, 1)))
        # Recomputing more is never faster: of each sharding the first checkpointing that fits, if it can beat the mark.
        first = _first(np.moveaxis(fit, 1, 0))
        sharding, at = np.nonzero(first >= 0)
        way = first[sharding, at]
        machine, row = machine[at], row[at]
        key = machine * self.width + self.table.nodes[row]
        mark = (1 + TIE) * self.marks[self.sureness(machine, row), key]
        may = self.floor.hours(machine, row, way) <= mark
        machine, row, mark = machine[may], row[may], mark[may]
        sharding, way = self.shardings[sharding[may]], self.checkpointings[way[may]]
        columns: dict[str, Any] = dict(zip(_COLUMNS, self.columns[:, row], strict=True))
        columns |= {"sharding": sharding.astype(float), "checkpointing": way.astype(float)}
        hours = self.steps[row] * step_s(self.machines.inputs(machine, columns)) / 3600
        kept = hours <= mark
        found = _Entries(machine=machine, row=row, sharding=sharding, checkpointing=way, hours=hours)
        return found.take(kept), lacks

    def _know(self, row: Ints) -> None:
        """Work out what rows need of a GPU's memory, where it is not known: once for all machines."""
        asked = np.zeros_like(self.known)
        asked[row] = True
        new = np.flatnonzero(asked & ~self.known)
        self.peak_gib[:, :, new], self.nccl_gib[new] = self._needed_gib(new, self.columns[:, new])
        self.known[new] = True

    def _needed_gib(self, row: Ints, values: Floats) -> tuple[Floats, Floats]:
        """Peak (shardings x checkpointings x rows) and what NCCL needs (rows), of rows with other ``values``."""
        peak_gib = np.empty((self.shardings.size, self.checkpointings.size, row.size))
        nccl_gib = np.empty(row.size)

        def fill(piece: slice) -> None:
            ranks = self.ranks[row[piece]].astype(float)
            x = self.machines.any_with(ranks, self._columns_of(values[:, piece]))
            peak_gib[:, :, piece], nccl_gib[piece] = needed_gib(x)

        _each(fill, [slice(start, start + _CHUNK) for start in range(0, row.size, _CHUNK)])
        return peak_gib, nccl_gib

    def inputs(self, machine: Ints, row: Ints) -> Inputs:
        """Inputs of shape shardings x checkpointings x rows."""
        return self._inputs_of(machine, self.columns[:, row])

    def _inputs_of(self, machine: Ints, values: Floats) -> Inputs:
        return self.machines.inputs(machine, self._columns_of(values))

    def _columns_of(self, values: Floats) -> dict[str, Any]:
        columns: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
        return columns | {
            "sharding": self.shardings[:, None, None].astype(float),
            "checkpointing": self.checkpointings[:, None].astype(float),
        }

    def everything(self) -> tuple[Floats, Floats, Floats]:
        """Hours, peak and limit (GiB) of every configuration of one machine: rows x shardings x checkpointings.

        Hours are infinite where there is nothing to shard.
        """
        row = np.arange(self.table.size)
        x = self.inputs(np.zeros_like(row), row)
        shape = (self.shardings.size, self.checkpointings.size, row.size)
        hours = np.where(self.shards, self.steps * step_s(x) / 3600, np.inf)
        found = [np.moveaxis(np.broadcast_to(values, shape), -1, 0) for values in (hours, *room_gib(x))]
        return found[0], found[1], found[2]

    def of_rows(self, row: Ints, sharding: Ints, checkpointing: Ints, hours: Floats) -> Fastest:
        """Configurations of one machine, chosen by the caller: positions of rows, shardings and checkpointings."""
        sure = self.sureness(np.zeros_like(row), row) < 2
        return Fastest(
            instance=self.machines.instances[0],
            rows=self.table.take(row),
            sharding=self.shardings[sharding],
            checkpointing=self.checkpointings[checkpointing],
            relative_error=np.where(sure, self.errors[0], self.unsure),
            steps=self.steps[row].astype(np.int64),
            train_hours=hours,
            configurations=row.size,
            evaluated=row.size,
        )

    def _result(self, at: int) -> Fastest | Rejection:
        """What was found of one machine."""
        instance = self.machines.instances[at]
        found = self.found.take(self.found.machine == at)
        if not found.row.size:
            return self._no_room(at)
        rows = self.table.take(found.row)
        sure = self.sureness(found.machine, found.row) < 2
        return Fastest(
            instance=instance,
            rows=rows,
            sharding=found.sharding,
            checkpointing=found.checkpointing,
            relative_error=np.where(sure, self.errors[at], self.unsure),
            steps=self.steps[found.row].astype(np.int64),
            train_hours=found.hours,
            configurations=int(self._settings(self.slices[at]).sum()),
            evaluated=int(self.evaluated[at]),
        )

    def _choose(self) -> _Entries:
        """Of each machine, node count and sureness the simplest of the fastest, where it beats what is more sure."""
        names = [field.name for field in fields(_Entries)]
        found = _Entries(**{n: np.concatenate([getattr(piece, n) for piece in self.entries]) for n in names})
        key = found.machine * self.width + self.table.nodes[found.row]
        sureness = self.sureness(found.machine, found.row)
        mark = (1 + TIE) * self.marks[sureness, key]
        # By more than a tie: training code has to implement it.
        keep = (found.hours <= mark) & ((sureness == 0) | (self.marks[sureness - 1, key] > mark))
        found, key, sureness = found.take(keep), key[keep], sureness[keep]
        simplest = (
            found.hours,
            self.table.grad_accum[found.row],
            found.checkpointing,
            found.sharding,
            self.table.virtual_stages[found.row],
            self.axes[found.row],
        )
        group = len(self.marks) * key + sureness
        order = np.lexsort((*simplest, group))
        return found.take(order[np.concatenate(([True], np.diff(group[order]) > 0))[: order.size]])

    def _no_room(self, at: int) -> Rejection:
        instance = self.machines.instances[at]
        row = self.nearest[at : at + 1]
        peak_gib, limit_gib = np.broadcast_arrays(*room_gib(self.inputs(np.array([at]), row)))
        gap = np.where(self.shards[:, :, row], peak_gib - limit_gib, np.inf)
        if not np.isfinite(gap).any():
            kinds = ", ".join(SHARDINGS[sharding] for sharding in self.shardings)
            reason = f"one GPU has nothing to shard its state over, and sharding is {kinds}"
            return rejection(instance.name, "sharding", reason, kinds, SHARDINGS[DDP])
        sharding, _, _ = np.unravel_index(int(gap.argmin()), gap.shape)
        needs, leaves = float(peak_gib.flat[gap.argmin()]), float(limit_gib.flat[gap.argmin()])
        layout = described(self.table.take(row), SHARDINGS[self.shardings[sharding]])
        return rejection(
            instance.name,
            "memory",
            f"the smallest step needs {needs:.1f} GiB a GPU ({layout}), "
            f"and {instance.gpu.name} leaves {leaves:.1f} GiB",
            needs,
            leaves,
        )


class _Floor:
    """The least time of a row: a table of computation by machine, layout of a layer and micro-batch."""

    def __init__(self, search: Search) -> None:
        self.search = search
        table = search.table
        # Hours of a row for each second of a micro-batch: of a stage's share of the layers and what the bubble adds to
        # it, of an even share of the model, and of the head.
        stages, model = table.pipeline, search.model
        share = -(-model.layers // stages) / model.layers if model.layers else 1.0
        self.heads = search.steps * table.grad_accum / 3600
        self.evens = self.heads / stages
        self.wholes = share * (self.heads + search.steps * (stages - 1) / table.virtual_stages / 3600)
        sizes, size = _distinct(table.micro_batch)
        code = (((table.tensor << 10) + table.context) << 12) + table.expert
        codes, layer = _distinct(code)
        first = np.empty(codes.size, dtype=np.int64)
        first[layer] = np.arange(layer.size)
        self.at = layer * sizes.size + size
        layers = table.take(np.repeat(first, sizes.size))
        count = len(search.slices)
        cells = layers.size
        machine = np.repeat(np.arange(count), cells)
        ranks = np.array([instance.ranks for instance in search.machines.instances])[machine]
        layers = layers.take(np.tile(np.arange(cells), count))
        layers = replace(
            layers,
            # As few ranks as there can be, so that nothing else is in it.
            nodes=-(-layers.tensor * layers.context * layers.expert // ranks),
            data=layers.expert,
            pipeline=np.ones_like(machine),
            virtual_stages=np.ones_like(machine),
            grad_accum=np.ones_like(machine),
            micro_batch=np.tile(sizes, first.size * count),
        )
        columns = {name: getattr(layers, name)[:, None].astype(float) for name in _COLUMNS}
        columns |= {"sharding": np.array(float(DDP)), "checkpointing": search.checkpointings.astype(float)}
        shape = (machine.size, search.checkpointings.size)
        # Under autocast a mixture's experts are slower than sharded, and the bound is of every sharding.
        seconds = step_seconds(replace(search.machines.inputs(machine, columns, axes=1), autocast=0.0))
        parts = {name: np.broadcast_to(values, shape).reshape(count, cells, -1) for name, values in seconds.items()}
        # What a stage has of this is at least its share of the layers; the weights' copies at least an even share.
        self.whole = np.sum([parts[name] for name in _IN_LAYERS], axis=0)
        self.even, self.head = parts["elementwise"], parts["head"]
        self.least = tuple(part.min(axis=2) for part in (self.whole, self.even, self.head))

    def hours(self, machine: Ints, row: Ints, way: Ints) -> Floats:
        """The bound of each row with a checkpointing (position in the search's), hours of useful training."""
        at = self.at[row]
        return self._hours(row, *(part[machine, at, way] for part in (self.whole, self.even, self.head)))

    def least_hours(self, machine: Ints | int, row: Ints | slice) -> Floats:
        """The bound of each row whatever its checkpointing."""
        at = self.at[row]
        return self._hours(row, *(part[machine, at] for part in self.least))

    def _hours(self, row: Ints | slice, whole: Floats, even: Floats, head: Floats) -> Floats:
        return self.wholes[row] * whole + self.evens[row] * even + self.heads[row] * head


def estimates_of(
    chosen: Sequence[tuple[Fastest, int]], run: Run, model: ModelSpec, calibration: Calibration
) -> Estimates:
    """Estimates of rows of ``Fastest``, one an element of ``chosen``, of which there is one at least."""
    types = list({found.instance.name: found.instance for found, _ in chosen}.values())
    position = {instance.name: at for at, instance in enumerate(types)}
    columns = {name: np.array([getattr(found.rows, name)[at] for found, at in chosen], float) for name in _COLUMNS}
    for name in ("sharding", "checkpointing"):
        columns[name] = np.array([getattr(found, name)[at] for found, at in chosen], float)
    machine = np.array([position[found.instance.name] for found, _ in chosen])
    return evaluate_inputs(Machines.of(types, run, model, calibration).inputs(machine, columns))


def described(rows: space.Rows, sharding: str) -> str:
    """One row in words: "zero3 over 8 GPUs, tensor 2, pipeline 4, micro-batch 1"."""
    ways = {"tensor": rows.tensor, "pipeline": rows.pipeline, "context": rows.context, "expert": rows.expert}
    split = "".join(f", {name} {int(ranks[0])}" for name, ranks in ways.items() if ranks[0] > 1)
    ranks = int(rows.data[0])
    return f"{sharding} over {ranks} GPU{'s' * (ranks > 1)}{split}, micro-batch {int(rows.micro_batch[0])}"


def _distinct(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, sorted, and the place of each value in them; np.unique would import numpy.ma first."""
    ordered = np.sort(values)
    distinct = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: ordered.size]]
    return distinct, np.searchsorted(distinct, values)


def _first(fit: NDArray[np.bool_]) -> Ints:
    """The first place along axis 0 that is true; -1 where none is."""
    first = np.full(fit.shape[1:], -1)
    for at in range(len(fit))[::-1]:
        first[fit[at]] = at
    return first


def _each(function: Callable[[slice], Any], pieces: Sequence[slice]) -> list[Any]:
    """``function`` of each piece, in order; on two threads where there are processors for them: numpy lets both run."""
    if len(pieces) < 4 or (os.cpu_count() or 1) < 2:
        return [function(piece) for piece in pieces]
    results: list[Any] = [None] * len(pieces)

    def work(first: int) -> None:
        for at in range(first, len(pieces), 2):
            results[at] = function(pieces[at])

    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join()
    return results
