"""Owned nodes topped up with rented ones of the same type: the GPUs are alike, only the bill is mixed.

So the fastest configuration of as many nodes is that of a fleet of one type, with every kind of parallelism the search
knows; what is left is how many of the nodes are owned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.outcome import Outcome
from optimizer.mixed.mix import Mix
from optimizer.mixed.pricing import Terms
from optimizer.mixed.sources import zones
from optimizer.request import Constraints
from optimizer.search.candidates import keeps_limits, part_of, reserve_hours_of
from optimizer.search.fastest import Fastest, estimates_of
from optimizer.search.problem import Problem
from optimizer.search.purchases import Purchase

_LAYOUT = ("data", "tensor", "pipeline", "context", "expert", "sequence_parallel", "virtual_stages")


@dataclass(frozen=True, kw_only=True)
class _Cheapest:
    """The cheapest division of one pair of ways: a configuration, nodes had each way, hours and dollars."""

    config: int
    nodes: tuple[int, int]
    run: Outcome
    cost: FleetCost


def topped_up(problem: Problem, fastest: Sequence[Fastest], ways: Sequence[Purchase], terms: Terms) -> Iterator[Mix]:
    """The cheapest division that keeps the limits, for each owned type and way to have more of it.

    Args:
        problem: what to train.
        fastest: the fastest configurations of each type.
        ways, terms: how nodes can be had, and what that costs.
    """
    of_type = {found.instance.name: found for found in fastest}
    for a, owned in enumerate(ways):
        if owned.reservation is None or owned.offer.instance.name not in of_type:
            continue
        found = of_type[owned.offer.instance.name]
        for b, more in enumerate(ways):
            # Of two reservations, each pair once.
            if a == b or more.offer is not owned.offer or (more.reservation and b < a):
                continue
            if not set(zones(owned)) & set(zones(more)):
                continue
            best = _cheapest(found, (a, b), ways, terms, problem.request.constraints)
            if best is not None:
                yield _mix(problem, found, best, (owned, more))


def _cheapest(
    found: Fastest, pair: tuple[int, int], ways: Sequence[Purchase], terms: Terms, limits: Constraints
) -> _Cheapest | None:
    most = [way.reservation.count if (way := ways[at]).reservation else limits.max_nodes for at in pair]
    config, had = (array.ravel() for array in np.indices((found.nodes.size, most[0])))
    nodes = np.stack([had + 1, found.nodes[config] - had - 1], axis=1)
    fits = (nodes[:, 1] >= 1) & (nodes[:, 1] <= most[1])
    config, nodes = config[fits], nodes[fits]
    if not config.size:
        return None
    run, cost = terms.priced(
        np.broadcast_to(np.array(pair), nodes.shape),
        nodes,
        found.train_hours[config],
        found.checkpoint_writers[config],
        reserve_hours_of(found, terms.checkpoint_gib)[config],
        found.relative_error[config],
    )
    keeps = np.flatnonzero(keeps_limits(run, cost, limits))
    if not keeps.size:
        return None
    row = int(keeps[np.lexsort((run.hours_expected[keeps], cost.expected[keeps]))[0]])
    first, second = nodes[row].tolist()
    return _Cheapest(config=int(config[row]), nodes=(first, second), run=part_of(run, row), cost=part_of(cost, row))


def _mix(problem: Problem, found: Fastest, best: _Cheapest, ways: tuple[Purchase, Purchase]) -> Mix:
    at = best.config
    estimates = estimates_of(problem, [(found, at)])

    def number(values: NDArray[np.float64]) -> float:
        return float(values.reshape(-1)[0])

    def twice(values: NDArray[np.float64]) -> tuple[float, float]:
        return number(values), number(values)

    def both(values: NDArray[np.int64]) -> tuple[int, int]:
        return int(values[at]), int(values[at])

    ranks = found.instance.ranks
    return Mix(
        ways=ways,
        nodes=best.nodes,
        ranks=(best.nodes[0] * ranks, best.nodes[1] * ranks),
        layout={name: int(getattr(found.rows, name)[at]) for name in _LAYOUT},
        sharding=int(found.sharding[at]),
        checkpointing=both(found.checkpointing),
        micro_batch=both(found.rows.micro_batch),
        grad_accum=both(found.rows.grad_accum),
        global_batch=int(found.rows.batch[at]),
        steps=int(found.steps[at]),
        step_time_s=number(estimates.step_time_s),
        computed_s=twice(estimates.step_time_s - estimates.time_s["data_communication"]),
        peak_gib=twice(estimates.peak_memory_gib),
        limit_gib=twice(estimates.limit_gib),
        run=best.run,
        cost=best.cost,
        log_error=float(found.relative_error[at]),
    )
