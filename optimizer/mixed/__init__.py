"""Mixed fleets: two node groups, one of them owned, that train one data-parallel job.

``find_mixed`` is the entry. docs/mixed.md says what is assumed and what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optimizer.contract.plan import FleetPlan
from optimizer.search.fastest import Fastest
from optimizer.search.problem import Problem

__all__ = ["MAX_FLEETS", "find_mixed"]

# Fleets an answer lists, each the best of its pair of types.
MAX_FLEETS = 3


def find_mixed(problem: Problem, fastest: Sequence[Fastest], best: FleetPlan | None) -> tuple[dict[str, Any], ...]:
    """Find mixed fleets that keep the limits and are cheaper than the cheapest fleet of one type, cheapest first.

    Args:
        problem: the request, resolved. Without capacity the user owns there is nothing to mix.
        fastest: the fastest configurations of each type.
        best: the cheapest fleet of one type that keeps the limits; None where there is none.

    Returns:
        Entries of the answer's ``mixed_fleets``: the best of each pair of types, at most ``MAX_FLEETS``; empty where no
        mix is cheaper.

    Raises:
        DataMissingError: the catalog lacks a unit price in every region.
    """
    if not problem.request.constraints.usable_reservations or problem.request.constraints.max_nodes < 2:
        return ()
    # Imported here: most requests own nothing and need not wait for these modules.
    from optimizer.mixed.describe import describe_mix
    from optimizer.mixed.groups import NodeGroups
    from optimizer.mixed.top_up import top_ups
    from optimizer.mixed.unlike import unlike_mixes

    groups = NodeGroups.find(problem)
    # Cheaper by a cent at least.
    limit_usd = math.inf if best is None else best.cost_usd.expected - 0.005
    mixes = [*top_ups(problem, groups, fastest), *unlike_mixes(problem, groups, limit_usd)]
    cheapest = {mix.type_names: mix for mix in sorted(mixes, key=lambda mix: mix.rank, reverse=True)}
    cheaper = [mix for mix in cheapest.values() if mix.usd < limit_usd]
    return tuple(describe_mix(mix, problem, best) for mix in sorted(cheaper, key=lambda mix: mix.rank)[:MAX_FLEETS])
