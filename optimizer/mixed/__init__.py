"""Mixed fleets: two groups of nodes of different types, or paid for differently, training one data-parallel job.

docs/mixed.md says what is assumed. ``find_mixed`` is the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optimizer.catalog import Catalog
from optimizer.mixed.assemble import assemble_mixed
from optimizer.mixed.find import Search
from optimizer.mixed.fleet import NOT_PROVISIONED, Group, MixedFleet
from optimizer.performance.calibration import Calibration
from optimizer.plan import FleetPlan
from optimizer.request import FleetRequest
from optimizer.search import Amount
from optimizer.workload.model import ModelSpec

__all__ = ["NOT_PROVISIONED", "Group", "MixedFleet", "find_mixed"]


def find_mixed(
    request: FleetRequest,
    model: ModelSpec,
    amount: Amount,
    regions: Sequence[str],
    catalog: Catalog,
    calibration: Calibration,
    best: FleetPlan | None,
) -> tuple[MixedFleet, ...]:
    """The mixed fleets that keep the limits and are cheaper than the cheapest fleet of one type, cheapest first.

    A mix is two groups of nodes in one zone, of different types or of one type owned and rented. The model is whole on
    every rank or sharded over all of them (tensor, pipeline and context parallelism are 1).

    Args:
        request, model, amount: what to train, resolved.
        regions: regions considered.
        catalog, calibration: prices and facts, fitted speeds.
        best: the cheapest fleet of one type that keeps the limits; None where there is none.

    Returns:
        The best of each pair of types, at most MAX_FLEETS; empty where no mix is cheaper.

    Raises:
        DataMissingError: a price the cost needs is in no region of the catalog.
    """
    search = Search.of(request, model, amount, regions, catalog, calibration)
    if search is None:
        return ()
    below = math.inf if best is None else best.cost_usd.expected
    return tuple(assemble_mixed(mix, request, catalog, calibration, best) for mix in search.cheapest(below - 0.005))
