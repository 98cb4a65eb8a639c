"""Nearest plans: where no plan keeps the limits, the plans that keep them with one limit moved, or two.

Budget and deadline move to what the nearest candidate needs at the 95th percentile, ``max_nodes`` rises, regions,
instance types and purchase options that the request names are opened to all, and GPUs without the precision train in
bf16 or fp16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import Constraints, flag_of
from optimizer.search.candidates import Candidate, CandidateTable, find_candidates
from optimizer.search.plan_builder import build_plans
from optimizer.search.problem import AXES, Problem
from optimizer.search.ranking import SAME_SHOWN, rank_first

# ``max_nodes`` is raised to at most this many times the request's: the search takes longer with more nodes.
_MORE_NODES = 4
_MOST_NODES = 1000  # of a request
# Distance of a plan whose only change is an opened list, for the order: as far as a limit that doubles.
_OPENED = 1.0


@dataclass(frozen=True, kw_only=True)
class NearestPlan:
    """A plan beyond the limits.

    Attributes:
        changes: constraints of the request (or its precision), with the values that make the plan feasible; an empty
            tuple opens one.
        distance: sum of the relative changes of budget, deadline and nodes; None if a list of names is opened.
    """

    changes: Mapping[str, Any]
    distance: float | None
    plan: FleetPlan

    @property
    def flags(self) -> dict[str, list[str]]:
        """Flags of ``gpufleet recommend`` by constraint, each flag and value a word."""
        return {
            name: [flag_of(name), ",".join(value) or "*" if isinstance(value, tuple) else str(value)]
            for name, value in self.changes.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON answer's ``nearest``."""
        plan = self.plan
        return {
            "changes": {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.changes.items()
            },
            "distance": self.distance and round(self.distance, 4),
            "flags": [word for words in self.flags.values() for word in words],
            "plan": plan.model_dump(mode="json"),
        }


class _Move(NamedTuple):
    """Changes with their distance, the problem that has them, and its answer's first candidate."""

    changes: dict[str, Any]
    distance: float | None
    problem: Problem
    candidate: Candidate

    @property
    def order(self) -> float:
        if self.distance is not None:
            return self.distance
        return _OPENED if len(self.changes) == 1 and "parallelism" not in self.changes else math.inf


def find_nearest(problem: Problem, tables: Sequence[CandidateTable]) -> list[NearestPlan]:
    """Find the nearest plan for each limit, the nearest first; ``tables`` have no candidate that keeps the limits."""
    moves = _move_numbers(problem, tables)
    for changes in _list_changes(problem):
        moves += _change(problem, changes, alone=bool(tables))
    distinct = {tuple(move.changes.items()): move for move in moves}
    return [
        NearestPlan(
            changes=move.changes,
            distance=move.distance,
            plan=build_plans(move.problem, [move.candidate])[0].seal(),
        )
        for move in sorted(distinct.values(), key=lambda move: move.order)
    ]


def _move_numbers(problem: Problem, tables: Sequence[CandidateTable]) -> list[_Move]:
    limits, moves = problem.request.constraints, list[_Move]()
    given = {"budget_usd": limits.budget_usd, "deadline_hours": limits.deadline_hours}
    # The budget for the deadline, the deadline for the budget, both for the least budget, both for the shortest run.
    for kept, least in (
        ("deadline_hours", "budget_usd"),
        ("budget_usd", "deadline_hours"),
        (None, "budget_usd"),
        (None, "deadline_hours"),
    ):
        free = {name: None for name in given if name != kept}
        candidate = find_least(tables, limits.model_copy(update=free), least) if given[least] else None
        if candidate is None:
            continue
        needed = find_needs(candidate)
        changes = {name: needed[name] for name, limit in given.items() if limit is not None and needed[name] > limit}
        if least not in changes:  # another plan of the list moves the other limit less
            continue
        distance = sum(value / (given[name] or math.inf) - 1 for name, value in changes.items())
        moves.append(_settle(problem, changes, distance, tables, candidate))
    return moves


def find_needs(candidate: Candidate) -> dict[str, float]:
    """Return the least budget and deadline of a candidate, rounded up to two places."""
    table, row = candidate
    return {
        "budget_usd": math.ceil(100 * float(table.cost.p95[row] + table.cost.reserve[row])) / 100,
        "deadline_hours": math.ceil(100 * float(table.outcome.hours_p95[row])) / 100,
    }


def find_least(tables: Sequence[CandidateTable], limits: Constraints, name: str) -> Candidate | None:
    """Find the candidate within ``limits`` that needs the least of one limit, the cheapest of those shown as equal."""
    needs = []
    for table in tables:
        needed = {
            "budget_usd": table.cost.p95 + table.cost.reserve,
            "deadline_hours": table.outcome.hours_p95,
            "max_nodes": table.fastest.nodes[table.configuration],
        }[name]
        needs.append(np.where(table.feasible(limits), needed, np.inf))
    most = (1 + SAME_SHOWN) * min((float(need.min()) for need in needs if need.size), default=math.inf)
    found = [
        (float(table.cost.expected[row]), float(need[row]), index, int(row))
        for index, (table, need) in enumerate(zip(tables, needs, strict=True))
        for row in np.flatnonzero((need <= most) & np.isfinite(need))
    ]
    return Candidate(tables[min(found)[2]], min(found)[3]) if found else None


def _list_changes(problem: Problem) -> list[dict[str, Any]]:
    """Changes of the request that may give a plan: fp16, more nodes, opened lists, training code of the user's own."""
    limits, changes = problem.request.constraints, list[dict[str, Any]]()
    known = {name for instance in problem.instance_types for name in instance.gpu.peak_tflop_per_s}
    # T4 and V100 do not compute in bf16, nor A100 in fp8.
    if problem.recipe.precision not in known:
        changes += [{"precision": name} for name in ("bf16", "fp16") if name in known][:1]
    if limits.max_nodes < _MOST_NODES:
        changes.append({"max_nodes": min(_MORE_NODES * limits.max_nodes, _MOST_NODES)})
    changes += [{name: ()} for name in ("regions", "instance_types") if getattr(limits, name)]
    missing = [option for option in ("on-demand", "spot") if option not in limits.purchase_options]
    if missing:
        changes.append({"purchase_options": (*limits.purchase_options, *missing)})
    if problem.reach.only_trainers:
        changes.append({"parallelism": AXES})
    return changes


def _change(problem: Problem, changes: dict[str, Any], *, alone: bool) -> list[_Move]:
    """Nearest plan of a request with ``changes``; unless ``alone``, budget and deadline may move with them."""
    try:
        wider = problem.revise(**changes)
    except InvalidInputError:  # the workload computes in bf16 alone, as QLoRA does
        return []
    tables, _ = find_candidates(wider)
    if "max_nodes" in changes:
        candidate = find_least(tables, wider.request.constraints, "max_nodes")
    else:
        candidate = rank_first(tables, wider.request)
    if candidate is None:
        moved = [] if alone else _move_numbers(wider, tables)[:1]
        if "max_nodes" in changes and moved:
            changes = {"max_nodes": moved[0].candidate.nodes}
        return [move._replace(changes=changes | move.changes, distance=None) for move in moved]
    distance = None
    if "max_nodes" in changes:
        nodes = candidate.nodes
        changes, distance = {"max_nodes": nodes}, nodes / problem.request.constraints.max_nodes - 1
        tables = [table.keep(np.flatnonzero(table.nodes <= nodes)) for table in tables]
    return [_settle(problem, changes, distance, tables, candidate)]


def _settle(
    problem: Problem,
    changes: dict[str, Any],
    distance: float | None,
    tables: Sequence[CandidateTable],
    candidate: Candidate,
) -> _Move:
    """Take the answer's first candidate with ``changes``, which are rounded up; old spot prices head nothing."""
    moved = problem.revise(**changes)
    return _Move(changes, distance, moved, rank_first(tables, moved.request) or candidate)
