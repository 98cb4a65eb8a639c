"""Mixes of two instance types: bound the cost of every node count, then work out the cheapest.

The model is whole on every rank, or sharded evenly over all of them; tensor, pipeline, context and expert parallelism
are 1. Every number comes from the estimator that plans use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.controller import reserve_hours
from optimizer.mixed.batch_split import BatchSplit, GroupTimes, split_batch
from optimizer.mixed.groups import NodeGroups
from optimizer.mixed.mix import Mix
from optimizer.performance.evaluate import evaluate_inputs, room_gib
from optimizer.performance.inputs import Inputs
from optimizer.performance.machines import Machines
from optimizer.performance.rates import network_rate
from optimizer.performance.step import step_seconds
from optimizer.performance.types import DDP, ZERO2, Hardware
from optimizer.search import layouts
from optimizer.search.candidates import keeps_limits
from optimizer.search.problem import Problem
from optimizer.search.tables import take_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Most mixes to work out, in the order of their bounds; an answer that stops here may miss the cheapest mix.
_MOST_MIXES = 64
# Most mixes to bound by their communication too, in the order of the bounds without.
_MOST_BOUNDED = 1024
# Stands for infinitely many ranks: each holds least of a sharded state.
_MANY_RANKS = 1e9
# Micro-batches are tried up to 2048 samples.
_OCTAVES = 12
_DATA_ONLY = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "sequence_parallel": 0, "virtual_stages": 1}


def unlike_mixes(problem: Problem, groups: NodeGroups, limit_usd: float) -> list[Mix]:
    """Find mixes of two types that keep the limits and cost less than ``limit_usd``, the cheapest among them."""
    # Megatron-LM counts the micro-batches of a step once for all data-parallel ranks
    # (https://github.com/NVIDIA/Megatron-LM, megatron/core/num_microbatches_calculator.py).
    if "data" not in problem.reach.axes or problem.recipe.framework.startswith("megatron"):
        return []
    pairs = list(groups.pairs(like=False))
    return UnlikeSearch(problem=problem, groups=groups, pairs=pairs).cheapest(limit_usd) if pairs else []


def micro_batches(most: int) -> Ints:
    """Sizes of micro-batch to try, up to ``most``: four an octave, so that any share of a batch has one near to it."""
    powers = 2 ** np.arange(_OCTAVES)
    sizes = np.concatenate([[3], powers, *(powers[2:-1] // 4 * quarters for quarters in (5, 6, 7))])
    sizes.sort()
    return sizes[sizes <= max(1, most)]


@dataclass(frozen=True, kw_only=True)
class UnlikeSearch:
    """The search of one request, over pairs of groups of two types."""

    problem: Problem
    groups: NodeGroups
    pairs: Sequence[tuple[int, int]]

    @cached_property
    def _machines(self) -> Machines:
        problem = self.problem
        types = {p.offer.instance.name: p.offer.instance for p in self.groups.purchases}
        return Machines.build(list(types.values()), problem.recipe, problem.model, problem.calibration)

    @cached_property
    def _machine(self) -> NDArray[np.intp]:
        """Position of each group's type in ``_machines``."""
        names = [instance.name for instance in self._machines.instances]
        return np.array([names.index(p.offer.instance.name) for p in self.groups.purchases])

    @cached_property
    def _settings(self) -> dict[str, Ints]:
        """Sharding, checkpointing and micro-batch of every setting: flat columns of Grid."""
        amount, ranks = self.problem.amount, int(self.groups.ranks.min())
        choices = {
            "sharding": layouts.allowed_shardings(self.problem.recipe),
            "checkpointing": layouts.allowed_checkpointings(self.problem.model),
            "micro_batch": micro_batches(amount.global_batch // ranks),
        }
        places = np.indices([len(values) for values in choices.values()]).reshape(len(choices), -1)
        return {name: values[place] for (name, values), place in zip(choices.items(), places, strict=True)}

    def cheapest(self, limit_usd: float) -> list[Mix]:
        """Work mixes out in the order of their bounds until no bound is below the cheapest of its types."""
        pair, nodes, bound_usd = self.bounded(limit_usd)
        mixes: list[Mix] = []
        best: dict[frozenset[tuple[str, bool]], float] = {}
        worked_out = 0
        for index in np.argsort(bound_usd, kind="stable").tolist():
            if bound_usd[index] >= limit_usd or worked_out == _MOST_MIXES:
                break
            a, b = (self.groups.purchases[group] for group in pair[index].tolist())
            names = frozenset((p.offer.instance.name, p.reservation is not None) for p in (a, b))
            if bound_usd[index] >= best.get(names, np.inf):
                continue
            worked_out += 1
            mix = self.work_out(pair[index], nodes[index])
            if mix is not None:
                mixes.append(mix)
                best[names] = min(mix.usd, best.get(names, np.inf))
        return mixes

    def bounded(self, limit_usd: float) -> tuple[NDArray[np.intp], Ints, Floats]:
        """Pairs of groups with node counts (both mix x 2), and the least that each can cost, USD."""
        groups, amount = self.groups, self.problem.amount
        tried = [_node_counts(most) for most in groups.most_nodes.tolist()]
        counts = [np.stack(np.meshgrid(tried[a], tried[b]), axis=-1).reshape(-1, 2) for a, b in self.pairs]
        pair, nodes = np.repeat(self.pairs, [len(count) for count in counts], axis=0), np.concatenate(counts)
        ranks = nodes * groups.ranks[pair]
        # A rank of the other group takes one sample at least.
        largest = (amount.global_batch - ranks[:, ::-1]) // ranks
        possible = (nodes.sum(axis=1) <= self.problem.request.constraints.max_nodes) & (largest >= 1).all(axis=1)
        pair, nodes, ranks, largest = pair[possible], nodes[possible], ranks[possible], largest[possible]
        machine = self._machine[pair]
        samples_per_s = (self._samples_per_s(machine, largest) * ranks).sum(axis=1)
        with np.errstate(divide="ignore"):
            train_s = amount.samples / samples_per_s
        usd = self._least_usd(pair, nodes, train_s)
        keep = np.argsort(usd, kind="stable")[:_MOST_BOUNDED]
        keep = keep[usd[keep] < limit_usd]
        pair, nodes, train_s = pair[keep], nodes[keep], train_s[keep]
        train_s += amount.steps * self._least_exposed_s(machine[keep], nodes, ranks[keep], largest[keep])
        return pair, nodes, self._least_usd(pair, nodes, train_s)

    def _least_usd(self, pair: NDArray[np.intp], nodes: Ints, train_s: Floats) -> Floats:
        """Expected USD of mixes that train for so long; infinite where they break a limit."""
        writers = nodes.sum(axis=1).astype(float)
        soonest = reserve_hours(0.0, self.problem.checkpoint_gib, writers)
        outcome, cost = self.groups.price(pair, nodes, train_s / 3600, writers, soonest)
        return np.where(keeps_limits(outcome, cost, self.problem.request.constraints), cost.expected, np.inf)

    def _least_exposed_s(self, machine: NDArray[np.intp], nodes: Ints, ranks: Ints, largest: Ints) -> Floats:
        """Exposed communication of a step at least, s; a micro-batch as large as can be hides the most."""
        recipe, model = self.problem.recipe, self.problem.model
        grid = np.meshgrid(layouts.allowed_shardings(recipe), layouts.allowed_checkpointings(model), indexing="ij")
        sharding, checkpointing = (values.reshape(-1, 1, 1).astype(float) for values in grid)
        columns = {
            "sharding": sharding,
            "checkpointing": checkpointing,
            "micro_batch": np.minimum(largest, 2 ** (_OCTAVES - 1)).astype(float),
            "nodes": nodes.sum(axis=1, keepdims=True).astype(float),
            "data": ranks.sum(axis=1, keepdims=True).astype(float),
            "grad_accum": 1.0,
        }
        x = replace(self._machines.inputs(machine, columns), **self._slowest(machine))
        exposed = step_seconds(x)["data_communication"]
        return np.asarray(np.broadcast_to(exposed, (sharding.size, *machine.shape)).min(axis=0).max(axis=1))

    def _samples_per_s(self, machine: NDArray[np.intp], largest: Ints) -> Floats:
        """Most samples that one rank computes a second with micro-batches of at most ``largest``; 0: none fits.

        Over ever so many ranks and without communication, so an upper bound.
        """
        count, setting = np.indices((len(self._machines.instances), self._settings["micro_batch"].size)).reshape(2, -1)
        once, twice = (self._inputs(count, setting, _MANY_RANKS, _MANY_RANKS, accum) for accum in (1, 2))
        seconds = _computed_s(twice) - _computed_s(once)
        peak, limit = room_gib(once)
        sizes = self._settings["micro_batch"][setting]
        speed = np.where(peak <= limit, sizes / seconds, 0.0).reshape(len(self._machines.instances), -1)
        fits = self._settings["micro_batch"] <= largest[..., None]
        return np.asarray(np.where(fits, speed[machine], 0.0).max(axis=-1))

    def _inputs(self, machine: Any, setting: Ints, nodes: Any, ranks: Any, grad_accum: Any, **links: Any) -> Inputs:
        columns = {name: values[setting].astype(float) for name, values in self._settings.items()}
        given = {"nodes": nodes, "data": ranks, "grad_accum": grad_accum}
        columns |= {name: np.broadcast_to(np.asarray(value, float), setting.shape) for name, value in given.items()}
        return replace(self._machines.inputs(machine, columns), **links)

    def _slowest(self, machine: NDArray[np.intp]) -> dict[str, Any]:
        """Links and network of mixes (... x 2 types; fields of Inputs, ... x 1): those of the slower group."""
        hardware = [Hardware.from_instance_type(instance) for instance in self._machines.instances]
        with_efa, with_tcp = (
            np.array([network_rate(replace(h, efa=h.efa and efa, gpudirect=h.gpudirect and efa))[0] for h in hardware])
            for efa in (True, False)
        )
        # EFA talks to EFA; where one group has none, both speak TCP.
        efa = np.array([h.efa for h in hardware])[machine].all(axis=-1, keepdims=True)
        network = np.where(efa, with_efa[machine], with_tcp[machine])
        one = self._machines.inputs(np.arange(len(hardware)), {})
        links = {
            name: np.broadcast_to(getattr(one, name), len(hardware))[machine]
            for name in ("link_byte_per_s", "link_latency_s", "network_latency_s")
        }
        return {
            "network_byte_per_s": network.min(axis=-1, keepdims=True),
            "link_byte_per_s": links["link_byte_per_s"].min(axis=-1, keepdims=True),
            "link_latency_s": links["link_latency_s"].max(axis=-1, keepdims=True),
            "network_latency_s": links["network_latency_s"].max(axis=-1, keepdims=True),
        }

    def work_out(self, pair: NDArray[np.intp], nodes: Ints) -> Mix | None:
        """Find the fastest configuration of one mix; None where nothing fits or a limit is broken.

        A collective is as slow as its slowest link and network, and starts when the last rank is ready, so it hides
        behind no more than the group with the least computation left gives it.
        """
        problem, groups, machine = self.problem, self.groups, self._machine[pair]
        ranks, all_nodes = nodes * groups.ranks[pair], int(nodes.sum())
        together, links = int(ranks.sum()), self._slowest(machine)
        times = [self._times(machine[g], int(ranks[g]), all_nodes, together, links) for g in (0, 1)]
        splits: list[tuple[float, int, BatchSplit]] = []
        for sharding in np.unique(self._settings["sharding"]).tolist():
            a, b = (
                replace(t, first_s=np.where(self._settings["sharding"] == sharding, t.first_s, np.inf)) for t in times
            )
            split = split_batch(a, b, batch=problem.amount.global_batch, in_step=sharding >= ZERO2)
            if split:
                splits.append((split.step_time_s, sharding, split))
        if not splits:
            return None
        _, sharding, split = min(splits, key=lambda choice: choice[:2])
        setting, accum = np.array(split.setting), np.array(split.grad_accum)
        estimates = evaluate_inputs(self._inputs(machine, setting, all_nodes, together, accum, **links))
        exposed_s = estimates.time_s["data_communication"]
        computed_s = estimates.step_time_s - exposed_s
        step_s = float(computed_s.max() + exposed_s.max())
        writers = np.array([1.0 if sharding == DDP else float(all_nodes)])
        outcome, cost = groups.price(
            pair[None],
            nodes[None],
            np.array([problem.amount.steps * step_s / 3600]),
            writers,
            reserve_hours(np.array([step_s]), problem.checkpoint_gib, writers),
        )
        if not keeps_limits(outcome, cost, problem.request.constraints).all():
            return None
        return Mix(
            purchases=(groups.purchases[pair[0]], groups.purchases[pair[1]]),
            nodes=_two(nodes),
            ranks=_two(ranks),
            layout=_DATA_ONLY | {"data": together},
            sharding=sharding,
            checkpointing=_two(self._settings["checkpointing"][setting]),
            micro_batch=_two(self._settings["micro_batch"][setting]),
            grad_accum=split.grad_accum,
            global_batch=problem.amount.global_batch,
            steps=problem.amount.steps,
            step_time_s=step_s,
            computed_s=_two(computed_s),
            peak_gib=_two(estimates.peak_memory_gib),
            limit_gib=_two(estimates.limit_gib),
            outcome=take_rows(outcome, 0),
            cost=take_rows(cost, 0),
            relative_error=float(groups.relative_error[pair].max()),
        )

    def _times(self, machine: np.intp, ranks: int, nodes: int, together: int, links: dict[str, Any]) -> GroupTimes:
        """Seconds of one group by setting, within a job of so many nodes and ranks ``together``."""
        size = self._settings["micro_batch"].size
        setting = np.tile(np.arange(size), 2)
        accum = np.repeat([1, 2], size)
        x = self._inputs(np.full(2 * size, machine), setting, nodes, together, accum, **links)
        peak, limit = room_gib(x)
        seconds = step_seconds(x)
        exposed = np.broadcast_to(seconds["data_communication"], 2 * size).reshape(2, size)
        computed = (np.broadcast_to(sum(seconds.values()), 2 * size) - exposed.ravel()).reshape(2, size)
        fits = np.broadcast_to(peak <= limit, 2 * size).reshape(2, size)
        return GroupTimes(
            ranks=ranks,
            micro_batch=self._settings["micro_batch"],
            first_s=np.where(fits[0], computed[0], np.inf),
            further_s=np.where(fits[1], computed[1] - computed[0], np.inf),
            first_exposed_s=exposed[0],
            further_exposed_s=exposed[1] - exposed[0],
        )


def _node_counts(most: int) -> Ints:
    """Node counts to try: all up to 64; of more, 64 in steps of one ratio."""
    if most <= 64:
        return np.arange(1, most + 1)
    return np.array(sorted(set(np.geomspace(1, most, 64).round().astype(int).tolist())))


def _computed_s(x: Inputs) -> Floats:
    seconds = step_seconds(x)
    return np.asarray(sum(seconds.values()) - seconds["data_communication"])


def _two(values: NDArray[Any]) -> tuple[Any, Any]:
    first, second = values.tolist()
    return first, second
