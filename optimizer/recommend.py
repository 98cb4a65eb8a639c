"""From a FleetRequest to the best plans: resolve the model, search, rank, and write the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.assemble import assemble
from optimizer.catalog import Catalog
from optimizer.performance.calibration import Calibration
from optimizer.plan import SCHEMA_VERSION, FleetPlan
from optimizer.request import FleetRequest, Objective
from optimizer.search import (
    Amount,
    Rejection,
    Table,
    check_reservations,
    matching_regions,
    matching_types,
    pareto_front,
    search_type,
)
from optimizer.workload.resolve import resolve_model

# Most plans an answer lists; each is the best of its instance type and purchase option.
MAX_PLANS = 20


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer to a request.

    Attributes:
        request: what was asked.
        catalog: the prices and types it was answered from.
        plans: best first by the objective; the best of each instance type and purchase option, or the Pareto set.
        pareto: plans no other plan beats in both expected hours and expected cost, cheapest first.
        rejected: each considered type without a plan: instance_type, reason, binding_constraint, value, limit.
        searched_plans: configurations crossed with the ways to pay for them.
        elapsed_s: seconds the search took.
    """

    request: FleetRequest
    catalog: Catalog
    plans: tuple[FleetPlan, ...]
    pareto: tuple[FleetPlan, ...]
    rejected: tuple[Rejection, ...]
    searched_plans: int
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer of ``gpufleet recommend``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "request": self.request.model_dump(mode="json"),
            "catalog": self.catalog.describe(),
            "plans": [plan.model_dump(mode="json") for plan in self.plans],
            "pareto": [plan.model_dump(mode="json") for plan in self.pareto],
            "rejected": list(self.rejected),
            "searched_plans": self.searched_plans,
            "elapsed_s": round(self.elapsed_s, 4),
        }


def recommend(request: FleetRequest, catalog: Catalog, calibration: Calibration) -> Recommendation:
    """Find the best fleets for a request.

    Raises:
        InvalidInputError: an unknown model, region or instance type, or a workload the model cannot have.
        DataMissingError: a price the cost needs is in no region of the catalog.
    """
    started = time.perf_counter()
    model = resolve_model(request.model)
    amount = Amount.of(request, model)
    regions = matching_regions(request.constraints.regions, catalog)
    check_reservations(request.constraints.existing_reservations, catalog)
    tables: list[Table] = []
    rejected: list[Rejection] = []
    searched = 0
    for name in matching_types(request.constraints.instance_types, catalog):
        found = search_type(catalog.instance_type(name), request, model, amount, regions, catalog, calibration)
        if isinstance(found, dict):
            rejected.append(found)
            continue
        searched += found.fastest.evaluated * len(found.purchases)
        if found.feasible(request.constraints).any():
            tables.append(found)
        else:
            rejected.append(found.rejection(request.constraints))

    def plan(at: tuple[int, int]) -> FleetPlan:
        return assemble(
            tables[at[0]],
            at[1],
            request=request,
            model=model,
            amount=amount,
            catalog=catalog,
            calibration=calibration,
        )

    best, front = _rank(tables, request)
    pareto = tuple(plan(at) for at in front)
    return Recommendation(
        request=request,
        catalog=catalog,
        plans=pareto if request.objective == "pareto" else tuple(plan(at) for at in best),
        pareto=pareto,
        rejected=tuple(rejected),
        searched_plans=searched,
        elapsed_s=time.perf_counter() - started,
    )


def _rank(tables: list[Table], request: FleetRequest) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The best candidate of each type and purchase option, best first, and the Pareto set; as (table, row)."""
    best: list[tuple[tuple[float, ...], tuple[int, int]]] = []
    at: list[tuple[int, int]] = []
    hours, cost = [], []
    for index, table in enumerate(tables):
        feasible = np.flatnonzero(table.feasible(request.constraints))
        options = np.array([way.option for way in table.purchases])[table.purchase[feasible]]
        for option in np.unique(options):
            rows = feasible[options == option]
            keys = _keys(table, rows, request.objective)
            first = int(np.lexsort(keys[::-1])[0])
            best.append((tuple(float(key[first]) for key in keys), (index, int(rows[first]))))
        front = feasible[pareto_front(table.run.hours_expected[feasible], table.cost.expected[feasible])]
        at += [(index, int(row)) for row in front]
        hours.append(table.run.hours_expected[front])
        cost.append(table.cost.expected[front])
    best.sort()
    if not at:
        return [], []
    overall = pareto_front(np.concatenate(hours), np.concatenate(cost))
    return [where for _, where in best[:MAX_PLANS]], [at[i] for i in overall]


def _keys(table: Table, rows: Any, objective: Objective) -> list[Any]:
    cost, hours = table.cost.expected[rows], table.run.hours_expected[rows]
    nodes = table.fastest.nodes[table.config[rows]]
    return [hours, cost, nodes] if objective == "time" else [cost, hours, nodes]
