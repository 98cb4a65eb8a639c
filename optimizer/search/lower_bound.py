"""``LowerBound``: the least hours that a row can take, cheap enough to spare the search most evaluations.

It counts the computation, host work and communication of the layers, the pipeline's bubble, and the data-parallel
communication that computation cannot hide, but not the optimizer and the sends between stages. Two small tables hold
its terms: seconds of work (machine, tensor, context, expert, stages, micro-batch) and of exchanges (machine, layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from optimizer.performance.communication import communication, data_communication
from optimizer.performance.compute import compute
from optimizer.performance.step import always_shown
from optimizer.performance.types import DDP, NONE, ZERO3, Floats, Ints
from optimizer.search.layouts import GRID_COLUMNS, LayoutTable, first_indices
from optimizer.search.search_space import SearchSpace
from optimizer.search.tables import take_rows
from optimizer.workload.model import ModelSpec

# Exchanges computed together: intermediate arrays of this length stay in the processor's cache.
_CHUNK = 4096


class _Exchange(NamedTuple):
    exposed: Floats
    hideable: Floats


class LowerBound:
    """The least hours of rows, by machine, sharding and checkpointing.

    A checkpointing is its index in ``SearchSpace.checkpointings``; their number stands for none that fits: infinite.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        balanced = bool(np.any(space.machines.common.balances_stages))
        kinds = [_Kinds(table, space.model, balanced=balanced) for table in space.tables]
        by_machine = [kinds[i] for i in space.table_index]
        table = space.table
        # Hours of the run for each second of a step; of a row for each of a micro-batch, of the bubble.
        self._step_hours = space.steps / 3600
        self._micro_batch_hours = self._step_hours * table.grad_accum
        self._bubble_hours = self._step_hours * (table.pipeline - 1) / table.virtual_stages
        self._row_work = np.concatenate([kind.row_work for kind in kinds])
        self._row_exchange = np.concatenate([kind.row_exchange for kind in kinds])
        self._first_work = np.cumsum([0, *(kind.work_shape.size for kind in by_machine)])
        self._works = int(self._first_work[-1])
        self._compute(by_machine)
        self._communicate(by_machine)

    def _compute(self, by_machine: Sequence[_Kinds]) -> None:
        """Tabulate seconds of a micro-batch on the fullest stage, with and without the head."""
        machines, checkpointings = self._space.machines, self._space.checkpointings
        shapes = [kind.shapes for kind in by_machine]
        machine = np.repeat(np.arange(len(by_machine)), [shape.size for shape in shapes])
        settings = {name: np.concatenate([getattr(shape, name) for shape in shapes]) for name in GRID_COLUMNS}
        ranks = np.array([instance.ranks for instance in machines.instances])[machine]
        # The fewest nodes, so that nothing but the shape's own ranks counts.
        settings["nodes"] = -(-settings["tensor"] * settings["context"] * settings["expert"] // ranks)
        columns: dict[str, Any] = {name: values.astype(float) for name, values in settings.items()}
        columns |= {"sharding": float(DDP), "checkpointing": checkpointings[:, None].astype(float)}
        # Autocast makes a mixture's experts, the residual and copies of weights slower than FSDP2 does, and the bound
        # holds for every sharding.
        x = machines.inputs(machine, columns)
        narrow = np.where(x.written_out * x.fsdp2 > 0, np.minimum(x.element_bytes, x.residual_bytes), x.residual_bytes)
        x = replace(x, autocast=0.0, residual_bytes=narrow, cast_bytes=np.where(x.fsdp2 > 0, 0.0, x.cast_bytes))
        work, sent = compute(x), communication(x)
        # Exposed communication, like step.step_seconds.
        tensor = sent.tensor * np.where(x.overlaps_tensor > 0, x.coefficients.exposed_communication, 1.0)
        context = np.maximum(0.0, sent.context - (1.0 - 1.0 / x.context) * work.layer_attention)
        layers = work.layer_matmul + work.layer_attention + work.layer_elementwise + tensor + context + sent.expert
        parts = [
            np.broadcast_to(seconds, (checkpointings.size, machine.size))
            for seconds in (layers, work.head, work.host, work.waits, work.weights)
        ]
        ends = np.cumsum([0, *(shape.size for shape in shapes)]).tolist()
        # The last row stands for no checkpointing that fits.
        levels = checkpointings.size + 1
        without_head, micro_batch = np.zeros((levels, self._works)), np.full((levels, self._works), np.inf)
        for i, kind in enumerate(by_machine):  # a machine at a time stays in the cache
            layers_s, head_s, host_s, waits_s, weights_s = (
                seconds[:, ends[i] : ends[i + 1]].take(kind.work_shape, axis=1) for seconds in parts
            )
            layers_s *= kind.work_share
            host_s *= kind.work_share
            waits_s *= kind.work_share
            head_s *= kind.head_share
            own = slice(self._first_work[i], self._first_work[i + 1])
            # A stage takes at least its GPU's time and its host's, and an even share of the weights' copies.
            np.add(np.maximum(layers_s, host_s), waits_s, out=without_head[:-1, own])
            busy_s = np.maximum(layers_s + head_s, host_s) + waits_s
            np.add(busy_s, weights_s / kind.work_stages, out=micro_batch[:-1, own])
        self._micro_batch_s, self._without_head_s = micro_batch.ravel(), without_head.ravel()

    def _communicate(self, by_machine: Sequence[_Kinds]) -> None:
        """Tabulate seconds of data-parallel communication, of each micro-batch and once a step."""
        space = self._space
        exchanges = [kind.exchanges for kind in by_machine]
        machine = np.repeat(np.arange(len(by_machine)), [exchange.size for exchange in exchanges])
        columns = {name: np.concatenate([getattr(e, name) for e in exchanges]).astype(float) for name in GRID_COLUMNS}
        micro_batch, once = np.empty((2, space.shardings.size, machine.size))
        always = np.empty_like(once)
        for start in range(0, machine.size, _CHUNK):
            piece = slice(start, start + _CHUNK)
            settings: dict[str, Any] = {name: values[piece] for name, values in columns.items()}
            # Recomputing gathers no less.
            settings |= {"sharding": space.shardings[:, None].astype(float), "checkpointing": float(NONE)}
            x = space.machines.inputs(machine[piece], settings)
            micro_batch[:, piece], once[:, piece] = data_communication(x)
            always[:, piece] = always_shown(x)
        self._micro_batch_exchange, self._step_exchange = (
            [
                _Exchange(shown * sent, (1.0 - shown) * sent) if sent.any() else None
                for shown, sent in zip(always, by_sharding, strict=True)
            ]
            for by_sharding in (micro_batch, once)
        )
        self._first_exchange = np.cumsum([0, *(exchange.size for exchange in exchanges[:-1])])

    def least_hours(self, machine: int, rows: slice, checkpointing: Ints) -> Floats:
        """Bound of a machine's rows, a checkpointing each, without data-parallel communication."""
        index = checkpointing * self._works
        index += self._row_work[rows]
        index += self._first_work[machine]
        hours = self._micro_batch_s.take(index)
        hours *= self._micro_batch_hours[rows]
        bubble = self._without_head_s.take(index)
        bubble *= self._bubble_hours[rows]
        hours += bubble
        return hours

    def hours(self, machine: Ints | int, row: Ints, checkpointing: Ints) -> Floats:
        """Bound of rows with a checkpointing for each sharding: shardings x rows."""
        work = self._row_work[row] + self._first_work[machine]
        exchange = self._row_exchange[row] + self._first_exchange[machine]
        micro_batch_hours, bubble_hours = self._micro_batch_hours[row], self._bubble_hours[row]
        indices = checkpointing * self._works
        indices += work
        hours = np.empty(checkpointing.shape)
        for i, sharding in enumerate(self._space.shardings):
            micro_batch_s = self._micro_batch_s.take(indices[i])
            total = np.multiply(micro_batch_hours, micro_batch_s, out=hours[i])
            total += bubble_hours * self._without_head_s.take(indices[i])
            # Like step.step_seconds: a step with more computation hides more, and never takes less.
            room = micro_batch_s * (2.0 / 3.0)
            each, once = self._micro_batch_exchange[i], self._step_exchange[i]
            if each is not None:
                exposed, hideable = each.exposed.take(exchange), each.hideable.take(exchange)
                exposed += np.maximum(hideable - (micro_batch_s if sharding >= ZERO3 else room), 0.0)
                exposed *= micro_batch_hours
                total += exposed
                if once is not None:
                    room = np.maximum(room - hideable, 0.0)
            if once is not None:
                exposed, hideable = once.exposed.take(exchange), once.hideable.take(exchange)
                exposed += np.maximum(hideable - room, 0.0)
                exposed *= self._step_hours
                total += exposed
        return hours


class _Kinds:
    """The distinct kinds of work and of exchange among the rows of one table.

    Attributes:
        shapes: a row for each (tensor, context, expert, micro-batch): the time of a layer depends on nothing else.
        work_shape, work_stages, work_share: of each kind of work, shape, stages and layers' share of the fullest stage.
        head_share: of the head's time: all, or where stages are balanced the mean stage's, which the slowest exceeds.
        exchanges: a row for each kind of data-parallel ranks.
        row_work, row_exchange: of each row, its kind.
    """

    def __init__(self, table: LayoutTable, model: ModelSpec, *, balanced: bool) -> None:
        first = take_rows(table, table.first_rows)  # a row for each layout
        sizes, size = distinct(table.micro_batch)
        meshes, mesh = distinct(_encode(first.tensor, first.context, first.expert))
        pipelines, pipeline = distinct(_encode(mesh, first.pipeline))
        mesh_layout, pipeline_layout = first_indices(meshes.size, mesh), first_indices(pipelines.size, pipeline)
        one = np.ones(meshes.size * sizes.size, dtype=np.int64)
        shapes = take_rows(first, np.repeat(mesh_layout, sizes.size))
        self.shapes = replace(
            shapes,
            data=shapes.expert,
            pipeline=one,
            virtual_stages=one,
            grad_accum=one,
            micro_batch=np.tile(sizes, meshes.size),
        )
        self.work_shape = (mesh[pipeline_layout, None] * sizes.size + np.arange(sizes.size)).ravel()
        self.work_stages = np.repeat(first.pipeline[pipeline_layout], sizes.size)
        layers = model.layers
        self.work_share = np.ceil(layers / self.work_stages) / layers if layers else np.ones(self.work_stages.size)
        self.head_share: Floats | float = 1.0
        if balanced and layers:
            self.work_share = self.head_share = 1.0 / self.work_stages
        self.row_work = pipeline[table.layout] * sizes.size + size
        # Nodes follow: a node has as many ranks on all rows of a table.
        ranks = first.data * first.context
        codes, exchange = distinct(_encode(ranks, first.tensor, first.pipeline, first.expert))
        exchanges = take_rows(first, first_indices(codes.size, exchange))
        self.exchanges = replace(
            exchanges, data=exchanges.data * exchanges.context, context=np.ones_like(exchanges.context)
        )
        self.row_exchange = exchange[table.layout]


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, sorted, and each value's index in them; np.unique would import numpy.ma."""
    ordered = np.sort(values)
    unique = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: ordered.size]]
    return unique, np.searchsorted(unique, values)


def _encode(*columns: Ints) -> Ints:
    """One number for each combination of numbers from 0."""
    code = np.zeros_like(columns[0])
    for column in columns:
        code = code * (int(column.max()) + 1) + column
    return code
