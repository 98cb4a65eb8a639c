"""Top-ups: owned nodes and more of the same type. The GPUs are alike, so only the bill is mixed.

The fastest configuration of as many nodes is that of a fleet of one type, with every kind of parallelism; left to find
is how many of the nodes are owned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optimizer.mixed.groups import NodeGroups
from optimizer.mixed.mix import Mix
from optimizer.search.candidates import keeps_limits
from optimizer.search.fastest import Fastest, estimate_configurations
from optimizer.search.problem import Problem
from optimizer.search.tables import take_rows

_LAYOUT = ("data", "tensor", "pipeline", "context", "expert", "sequence_parallel", "virtual_stages")


def top_ups(problem: Problem, groups: NodeGroups, fastest: Sequence[Fastest]) -> Iterator[Mix]:
    """Yield the cheapest division that keeps the limits, for each owned group and way to have more of its type.

    Args:
        problem: the request, resolved.
        groups: the node groups.
        fastest: the fastest configurations of each type.
    """
    by_type = {configurations.instance.name: configurations for configurations in fastest}
    for pair in groups.pairs(like=True):
        owned, other = (groups.purchases[position] for position in pair)
        if owned.reservation and owned.reservation.takes_top_up and other.option == "on-demand":
            continue  # a plan, found by the search of plans
        configurations = by_type.get(owned.offer.instance.name)
        if configurations and (mix := _cheapest(problem, groups, pair, configurations)):
            yield mix


def _cheapest(problem: Problem, groups: NodeGroups, pair: tuple[int, int], fastest: Fastest) -> Mix | None:
    most = groups.most_nodes[list(pair)]
    config, owned = (array.ravel() for array in np.indices((fastest.nodes.size, int(most[0]))))
    nodes = np.stack([owned + 1, fastest.nodes[config] - owned - 1], axis=1)
    possible = (nodes[:, 1] >= 1) & (nodes[:, 1] <= most[1])
    config, nodes = config[possible], nodes[possible]
    if not config.size:
        return None
    outcome, cost = groups.price(
        np.broadcast_to(np.array(pair), nodes.shape),
        nodes,
        fastest.train_hours[config],
        fastest.checkpoint_writers[config],
        fastest.reserve_hours(problem)[config],
        fastest.relative_error[config],
    )
    keeps = np.flatnonzero(keeps_limits(outcome, cost, problem.request.constraints))
    if not keeps.size:
        return None
    row = int(keeps[np.lexsort((outcome.hours_expected[keeps], cost.expected[keeps]))[0]])
    at = int(config[row])
    estimates = estimate_configurations(problem, [(fastest, at)])
    computed_s = float((estimates.step_time_s - estimates.time_s["data_communication"])[0])
    first, second = nodes[row].tolist()
    ranks = fastest.instance.ranks
    micro_batch, grad_accum = int(fastest.layouts.micro_batch[at]), int(fastest.layouts.grad_accum[at])
    peak_gib, limit_gib = float(estimates.peak_memory_gib[0]), float(estimates.limit_gib[0])
    return Mix(
        purchases=(groups.purchases[pair[0]], groups.purchases[pair[1]]),
        nodes=(first, second),
        ranks=(first * ranks, second * ranks),
        layout={name: int(getattr(fastest.layouts, name)[at]) for name in _LAYOUT},
        sharding=int(fastest.sharding[at]),
        checkpointing=(int(fastest.checkpointing[at]),) * 2,
        micro_batch=(micro_batch, micro_batch),
        grad_accum=(grad_accum, grad_accum),
        global_batch=problem.amount.global_batch,
        steps=problem.amount.steps,
        step_time_s=float(estimates.step_time_s[0]),
        computed_s=(computed_s, computed_s),
        peak_gib=(peak_gib, peak_gib),
        limit_gib=(limit_gib, limit_gib),
        outcome=take_rows(outcome, row),
        cost=take_rows(cost, row),
        relative_error=float(fastest.relative_error[at]),
    )
