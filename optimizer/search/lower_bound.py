"""The least time of a configuration: what spares the search from evaluating most of them.

The bound of a row of ``space``, with a sharding and a checkpointing, has the computation, the host's work and the
communication of its layers, the pipeline's bubble, and the data-parallel communication that computation cannot hide;
it leaves out the optimizer and the sends between stages. Computation comes from a table by (machine, tensor, context,
expert, stages, micro-batch), of which there are few; data-parallel communication from one by (machine, layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.performance.communication import communication, data_communication
from optimizer.performance.compute import compute
from optimizer.performance.machines import Machines
from optimizer.performance.step import always_shown
from optimizer.performance.types import DDP, NONE, ZERO3
from optimizer.search import layouts
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# What a configuration has of ``layouts.LayoutTable``: fields of Grid.
COLUMNS = tuple(field.name for field in fields(layouts.LayoutTable) if field.name != "layout")
# Configurations worked out together: intermediate arrays of this length stay in the processor's cache.
_CHUNK = 4096


class Floor:
    """The least hours of rows, by machine, sharding and checkpointing.

    A checkpointing is its position in ``checkpointings``; their number stands for none that fits: infinite hours.
    """

    def __init__(
        self,
        *,
        machines: Machines,
        tables: Sequence[layouts.LayoutTable],
        table_of: Sequence[int],
        first_rows: Sequence[Ints],
        steps: Floats,
        model: ModelSpec,
        shardings: Ints,
        checkpointings: Ints,
    ) -> None:
        """Work the tables out.

        Args:
            machines: the machines.
            tables, table_of: rows, and of each machine which of the tables it has.
            first_rows: of each table, the first row of each layout.
            steps: of the rows of all tables, one table after the other.
            model, shardings, checkpointings: what is trained, and how it may be.
        """
        self.shardings, self.ways = shardings, checkpointings.size + 1
        kinds = [_Kinds(table, first, model) for table, first in zip(tables, first_rows, strict=True)]
        mine = [kinds[at] for at in table_of]
        joined = {
            n: np.concatenate([getattr(t, n) for t in tables]) for n in ("grad_accum", "pipeline", "virtual_stages")
        }
        # Hours of a row for each second: of a micro-batch, of what its bubble has, of a step.
        self.step_hours = steps / 3600
        self.passes = self.step_hours * joined["grad_accum"]
        self.bubbles = self.step_hours * (joined["pipeline"] - 1) / joined["virtual_stages"]
        self.work = np.concatenate([kind.work for kind in kinds])
        self.group = np.concatenate([kind.group for kind in kinds])
        self._compute(machines, mine, checkpointings)
        self._communicate(machines, mine)

    def _compute(self, machines: Machines, mine: Sequence[_Kinds], checkpointings: Ints) -> None:
        """Seconds of a micro-batch on a stage, and those of its layers, by machine, kind of work and checkpointing."""
        cells = [kind.cells for kind in mine]
        machine = np.repeat(np.arange(len(mine)), [cell.tensor.size for cell in cells])
        settings = {name: np.concatenate([getattr(cell, name) for cell in cells]) for name in COLUMNS}
        ranks = np.array([instance.ranks for instance in machines.instances])[machine]
        # As few ranks as there can be, so that nothing else is in it.
        settings["nodes"] = -(-settings["tensor"] * settings["context"] * settings["expert"] // ranks)
        columns: dict[str, Any] = {name: values.astype(float) for name, values in settings.items()}
        columns |= {"sharding": float(DDP), "checkpointing": checkpointings[:, None].astype(float)}
        # Under autocast a mixture's experts are slower than sharded, and the bound is of every sharding.
        x = replace(machines.inputs(machine, columns), autocast=0.0)
        work, sent = compute(x), communication(x)
        # As in step.step_seconds: what shows of tensor and context ranks' communication.
        tensor = sent.tensor * np.where(x.overlaps_tensor > 0, x.coefficients.exposed_communication, 1.0)
        context = np.maximum(0.0, sent.context - (1.0 - 1.0 / x.context) * work.layer_attention)
        layers = work.layer_matmul + work.layer_attention + work.layer_elementwise + tensor + context + sent.expert
        parts = [
            np.broadcast_to(seconds, (checkpointings.size, machine.size))
            for seconds in (layers, work.head, work.host, work.waits, work.weights)
        ]
        ends = np.cumsum([0, *(cell.tensor.size for cell in cells)]).tolist()
        self.first_work = np.cumsum([0, *(kind.cell.size for kind in mine)])
        self.works = int(self.first_work[-1])
        # The last of each is for no checkpointing.
        staged, second = np.zeros((self.ways, self.works)), np.full((self.ways, self.works), np.inf)
        for at, kind in enumerate(mine):  # a machine at a time stays in the cache
            layers_s, head_s, host_s, waits_s, weights_s = (
                seconds[:, ends[at] : ends[at + 1]].take(kind.cell, axis=1) for seconds in parts
            )
            layers_s *= kind.share
            host_s *= kind.share
            waits_s *= kind.share
            own = slice(self.first_work[at], self.first_work[at + 1])
            # A stage takes no less than its GPU, nor than its host; of the weights' copies it has at least an even
            # share.
            np.add(np.maximum(layers_s, host_s), waits_s, out=staged[:-1, own])
            np.add(np.maximum(layers_s + head_s, host_s) + waits_s, weights_s / kind.stages, out=second[:-1, own])
        self.second, self.staged = second.ravel(), staged.ravel()

    def _communicate(self, machines: Machines, mine: Sequence[_Kinds]) -> None:
        """Seconds of data-parallel communication by sharding, machine and group: what always shows, and the rest."""
        machine = np.repeat(np.arange(len(mine)), [kind.groups.nodes.size for kind in mine])
        groups = [kind.groups for kind in mine]
        columns = {name: np.concatenate([getattr(g, name) for g in groups]).astype(float) for name in COLUMNS}
        found = np.empty((2, self.shardings.size, machine.size))
        always = np.empty(machine.size)
        for at in range(0, machine.size, _CHUNK):
            piece = slice(at, at + _CHUNK)
            settings: dict[str, Any] = {name: values[piece] for name, values in columns.items()}
            # Recomputing gathers no less.
            settings |= {"sharding": self.shardings[:, None].astype(float), "checkpointing": float(NONE)}
            x = machines.inputs(machine[piece], settings)
            found[0, :, piece], found[1, :, piece] = data_communication(x)
            always[piece] = always_shown(x)
        # Of each sharding, where there is any: what every micro-batch sends, and what a step sends once.
        self.often, self.once = (
            [(always * sent, (1.0 - always) * sent) if sent.any() else None for sent in every] for every in found
        )
        self.first_group = np.cumsum([0, *(g.nodes.size for g in groups[:-1])])

    def least_hours(self, machine: int, rows: slice, way: Ints) -> Floats:
        """The bound of a machine's rows with a checkpointing each, without what data-parallel ranks send."""
        at = way * self.works
        at += self.work[rows]
        at += self.first_work[machine]
        hours = self.second.take(at)
        hours *= self.passes[rows]
        staged = self.staged.take(at)
        staged *= self.bubbles[rows]
        hours += staged
        return hours

    def hours(self, machine: Ints | int, row: Ints, way: Ints) -> Floats:
        """The bound of rows with a checkpointing for each sharding: shardings x rows."""
        work = self.work[row] + self.first_work[machine]
        group = self.group[row] + self.first_group[machine]
        passes, bubbles, step_hours = self.passes[row], self.bubbles[row], self.step_hours[row]
        settings = way * self.works
        settings += work
        hours = np.empty(way.shape)
        for which, sharding in enumerate(self.shardings):
            at = settings[which]
            second = self.second.take(at)
            total = np.multiply(passes, second, out=hours[which])
            total += bubbles * self.staged.take(at)
            # As in step.step_seconds: a step with more computation hides more, and never takes less.
            room = second * (2.0 / 3.0)
            often, once = self.often[which], self.once[which]
            if often is not None:
                shown, hidden = (seconds.take(group) for seconds in often)
                shown += np.maximum(hidden - (second if sharding >= ZERO3 else room), 0.0)
                shown *= passes
                total += shown
                if once is not None:
                    room = np.maximum(room - hidden, 0.0)
            if once is not None:
                shown, hidden = (seconds.take(group) for seconds in once)
                shown += np.maximum(hidden - room, 0.0)
                shown *= step_hours
                total += shown
        return hours


class _Kinds:
    """What differs among the rows of one table, as the tables of a Floor see them.

    Attributes:
        cells: one row for each kind of layer and micro-batch.
        cell, stages: of each kind of work (a cell and its number of stages).
        share: of the layers, that the fullest of so many stages has.
        work: of each row, its kind of work.
        groups: one row for each kind of data-parallel ranks.
        group: of each row, its kind of data-parallel ranks.
    """

    def __init__(self, table: layouts.LayoutTable, first_row: Ints, model: ModelSpec) -> None:
        layouts = table.take(first_row)
        sizes, size = distinct(table.micro_batch)
        layer_codes, layer = distinct(_code(layouts.tensor, layouts.context, layouts.expert))
        stage_codes, stage = distinct(_code(layer, layouts.pipeline))
        layer_first, stage_first = (_first_of(c.size, at) for c, at in ((layer_codes, layer), (stage_codes, stage)))
        one = np.ones(layer_codes.size * sizes.size, dtype=np.int64)
        kept = layouts.take(np.repeat(layer_first, sizes.size))
        self.cells = replace(
            kept,
            data=kept.expert,
            pipeline=one,
            virtual_stages=one,
            grad_accum=one,
            micro_batch=np.tile(sizes, layer_codes.size),
        )
        self.cell = (layer[stage_first, None] * sizes.size + np.arange(sizes.size)).ravel()
        self.stages = np.repeat(layouts.pipeline[stage_first], sizes.size)
        layers = model.layers
        self.share = np.ceil(layers / self.stages) / layers if layers else np.ones(self.stages.size)
        self.work = stage[table.layout] * sizes.size + size
        # Nodes follow from the others: a node has as many ranks on all rows of a table.
        ranks = layouts.data * layouts.context
        codes, group = distinct(_code(ranks, layouts.tensor, layouts.pipeline, layouts.expert))
        kept = layouts.take(_first_of(codes.size, group))
        self.groups = replace(kept, data=kept.data * kept.context, context=np.ones_like(kept.context))
        self.group = group[table.layout]


def distinct(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, sorted, and the place of each value in them; np.unique would import numpy.ma first."""
    ordered = np.sort(values)
    found = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: ordered.size]]
    return found, np.searchsorted(found, values)


def _code(*columns: Ints) -> Ints:
    """One number for each combination of numbers from 0."""
    code = np.zeros_like(columns[0])
    for column in columns:
        code = code * (int(column.max()) + 1) + column
    return code


def _first_of(count: int, place: Ints) -> Ints:
    """Of each of ``count`` places, the first element that has it."""
    first = np.empty(count, dtype=np.int64)
    first[place[::-1]] = np.arange(place.size)[::-1]
    return first
