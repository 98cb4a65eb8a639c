"""``what-if``: cost against deadline, nodes and budget.

One search serves all points: limits only choose among its candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimizer.catalog import Catalog
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import Constraints, FleetRequest
from optimizer.performance.calibration import Calibration
from optimizer.search.candidates import CandidateTable, find_tables
from optimizer.search.nearest import find_least, find_needs
from optimizer.search.plan_builder import PlanBuilder
from optimizer.search.problem import Problem

Axis = Literal["deadline", "nodes", "budget"]
_CONSTRAINTS: dict[Axis, str] = {"deadline": "deadline_hours", "budget": "budget_usd"}


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The best plan with one limit at ``value`` (hours, nodes or USD) and the request's others; None where none is."""

    against: Axis
    value: float
    plan: FleetPlan | None


def find_curves(
    request: FleetRequest,
    catalog: Catalog,
    calibration: Calibration,
    *,
    axes: Mapping[Axis, Sequence[float]],
    points: int,
) -> list[CurvePoint]:
    """Find the points of the curves.

    Args:
        request: its deadline is not used against deadlines, nor its budget against budgets; its objective never is.
        axes: the curves with their values; without values, ``points`` from the fastest to the cheapest plan.
    """
    problem = Problem.resolve(request, catalog, calibration)
    tables = find_tables(problem)
    curve_points = []
    for against, values in axes.items():
        for value in sorted(set(values)) or _choose_values(problem, tables, against, points):
            if against == "nodes":
                plan = _find_within(
                    problem, [table.keep(np.flatnonzero(table.nodes == value)) for table in tables], against
                )
            else:
                plan = _find_within(problem.with_constraints(**{_CONSTRAINTS[against]: value}), tables, against)
            curve_points.append(CurvePoint(against=against, value=value, plan=plan))
    return curve_points


def _choose_values(problem: Problem, tables: Sequence[CandidateTable], against: Axis, points: int) -> list[float]:
    if against == "nodes":
        known = {int(nodes) for table in tables for nodes in table.fastest.nodes}
        return [float(nodes) for nodes in sorted(known & {factor << power for power in range(10) for factor in (1, 3)})]
    name = _CONSTRAINTS[against]
    limits = problem.with_constraints(**{name: None}).request.constraints
    cheapest = find_least(tables, limits, "budget_usd") if against == "budget" else _find_cheapest(tables, limits)
    ends = [cheapest, find_least(tables, limits, "deadline_hours")]
    needs = [find_needs(*candidate)[name] for candidate in ends if candidate]
    if not needs:
        return []
    # Rounded up to three digits, so that the plan of each end is within.
    return sorted({_round_up(value) for value in np.geomspace(min(needs), max(needs), points).tolist()})


def _find_within(problem: Problem, tables: Sequence[CandidateTable], against: Axis) -> FleetPlan | None:
    limits = problem.request.constraints
    # The cheapest plan is the same for every budget that has one.
    candidate = find_least(tables, limits, "deadline_hours") if against == "budget" else _find_cheapest(tables, limits)
    return PlanBuilder(problem).build([candidate])[0] if candidate else None


def _find_cheapest(tables: Sequence[CandidateTable], limits: Constraints) -> tuple[CandidateTable, int] | None:
    """Find the candidate with the least expected USD; a looser limit never makes it dearer.

    So ties are not settled as ``recommend`` settles them: the surer or simpler plan may cost more.
    An old spot price counts only where no candidate at a current price is as fast.
    """
    found = [
        (index, row, float(table.cost.expected[row]), float(table.outcome.hours_p95[row]), table.stale[row])
        for index, table in enumerate(tables)
        for row in np.flatnonzero(table.feasible(limits)).tolist()
    ]
    fastest = min((hours for *_, hours, stale in found if not stale), default=math.inf)
    kept = [(usd, hours, index, row) for index, row, usd, hours, stale in found if not stale or hours < fastest]
    if not kept:
        return None
    *_, index, row = min(kept)
    return tables[index], row


def _round_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.ceil(value / unit * (1 - 1e-12)) * unit, 10)
