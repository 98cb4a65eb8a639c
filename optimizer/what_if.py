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
from optimizer.search.candidates import Candidate, CandidateTable, find_candidates
from optimizer.search.nearest import find_least, find_needs
from optimizer.search.plan_builder import build_plans
from optimizer.search.problem import Problem
from optimizer.search.ranking import rank_first

Axis = Literal["deadline", "nodes", "budget"]
POINTS = 8
_CONSTRAINTS: dict[Axis, str] = {"deadline": "deadline_hours", "budget": "budget_usd"}


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The best plan with one limit at ``value`` (hours, nodes or USD) and the request's others; None where none is."""

    against: Axis
    value: float
    plan: FleetPlan | None


def find_curves(
    request: FleetRequest, catalog: Catalog, calibration: Calibration, axes: Mapping[Axis, Sequence[float]]
) -> list[CurvePoint]:
    """Find the points of the curves.

    Args:
        request: its deadline is not used against deadlines, nor its budget against budgets; its objective never is.
        axes: the curves with their values; without values, POINTS from the fastest to the cheapest plan.
    """
    problem = Problem.resolve(request, catalog, calibration)
    tables, _ = find_candidates(problem)
    curve_points = []
    for against, values in axes.items():
        for value in sorted(set(values)) or _choose_values(problem, tables, against):
            if against == "nodes":
                plan = _find_within(
                    problem, [table.keep(np.flatnonzero(table.nodes == value)) for table in tables], against
                )
            else:
                plan = _find_within(problem.revise(**{_CONSTRAINTS[against]: value}), tables, against)
            curve_points.append(CurvePoint(against=against, value=value, plan=plan))
    return curve_points


def _choose_values(problem: Problem, tables: Sequence[CandidateTable], against: Axis) -> list[float]:
    if against == "nodes":
        known = {int(nodes) for table in tables for nodes in table.fastest.nodes}
        return [float(nodes) for nodes in sorted(known & {factor << power for power in range(10) for factor in (1, 3)})]
    name = _CONSTRAINTS[against]
    limits = problem.revise(**{name: None}).request.constraints
    current = _at_current_prices(tables, limits)
    cheapest = find_least(current, limits, "budget_usd") if against == "budget" else _find_best(problem, tables, limits)
    ends = [cheapest, find_least(current, limits, "deadline_hours")]
    needs = [find_needs(candidate)[name] for candidate in ends if candidate]
    if not needs:
        return []
    # Rounded up to three digits, so that the plan of each end is within.
    return sorted({_round_up(value) for value in np.geomspace(min(needs), max(needs), POINTS).tolist()})


def _find_within(problem: Problem, tables: Sequence[CandidateTable], against: Axis) -> FleetPlan | None:
    limits = problem.request.constraints
    if against == "budget":  # the cheapest plan is the same for every budget that has one
        candidate = find_least(_at_current_prices(tables, limits), limits, "deadline_hours")
    else:
        candidate = _find_best(problem, tables, limits)
    return build_plans(problem, [candidate])[0] if candidate else None


def _find_best(problem: Problem, tables: Sequence[CandidateTable], limits: Constraints) -> Candidate | None:
    """Find the first plan of ``recommend`` with objective cost within the limits."""
    request = problem.request.model_copy(update={"constraints": limits, "objective": "cost"})
    return rank_first(tables, request)


def _at_current_prices(tables: Sequence[CandidateTable], limits: Constraints) -> Sequence[CandidateTable]:
    """Return the tables without their old spot prices, unless these alone keep the limits."""
    current = [table.keep(np.flatnonzero(~table.stale)) for table in tables]
    return current if any(table.feasible(limits).any() for table in current) else tables


def _round_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.ceil(value / unit * (1 - 1e-12)) * unit, 10)
