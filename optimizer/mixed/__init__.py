"""Mixed fleets: two groups of nodes of different types, or paid for differently, training one data-parallel job.

docs/mixed.md says what is assumed. ``find_mixed`` is the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimizer.mixed.pairs import Pairs
from optimizer.mixed.pricing import Terms
from optimizer.mixed.sources import ways_to_have
from optimizer.performance.calibration import model_kind
from optimizer.plan import FleetPlan
from optimizer.search.fastest import Fastest
from optimizer.search.problem import Problem

if TYPE_CHECKING:
    from optimizer.mixed.fleet import MixedFleet

__all__ = ["find_mixed"]


def find_mixed(problem: Problem, fastest: Sequence[Fastest], best: FleetPlan | None) -> tuple[MixedFleet, ...]:
    """The mixed fleets that keep the limits and are cheaper than the cheapest fleet of one type, cheapest first.

    A mix is two groups of nodes in one zone: of unlike types, the model whole on every rank or sharded over all of them
    (tensor, pipeline and context parallelism are 1); or of one type, some owned and some rented.

    Args:
        problem: the request, resolved.
        fastest: the fastest configurations of each type.
        best: the cheapest fleet of one type that keeps the limits; None where there is none.

    Returns:
        The best of each pair of types, at most ``find.MAX_FLEETS``; empty where no mix is cheaper.

    Raises:
        DataMissingError: a price the cost needs is in no region of the catalog.
    """
    request, limits, recipe = problem.request, problem.request.constraints, problem.recipe
    model, amount, catalog, calibration = problem.model, problem.amount, problem.catalog, problem.calibration
    types = [
        instance
        for instance in problem.instance_types
        # A fraction of a GPU shares its network and host with strangers: no gang of them.
        if instance.gpu_count >= 1
        and recipe.precision in instance.gpu.peak_tflop_per_s
        and instance.ranks < amount.largest_batch
    ]
    ways = list(ways_to_have(types, problem.regions, limits, catalog))
    if len(ways) < 2 or limits.max_nodes < 2:
        return ()
    terms = Terms.of(ways, recipe, problem.checkpoint_gib, catalog, calibration, kind=model_kind(model))
    # Cheaper by a cent at least.
    below = math.inf if best is None else best.cost_usd.expected - 0.005
    pairs = Pairs.of(ways, terms, limits, amount, recipe, model, calibration)
    cheap = pairs is not None and pairs.could_cost_less(below)
    if not cheap and not any(way.reservation for way in ways):
        return ()
    # Here: most answers have no mix, and need not wait for what weighs them.
    from optimizer.mixed.assemble import assemble_mixed
    from optimizer.mixed.find import MAX_FLEETS, Search, cheapest_of_each
    from optimizer.mixed.topup import topped_up

    mixes = list(topped_up(problem, fastest, ways, terms))
    if pairs is not None:
        mixes = Search(**vars(pairs)).cheapest(below, mixes)
    found = sorted(cheapest_of_each(mixes, below).values(), key=lambda mix: mix.key)
    return tuple(assemble_mixed(mix, request, model, catalog, calibration, best) for mix in found[:MAX_FLEETS])
