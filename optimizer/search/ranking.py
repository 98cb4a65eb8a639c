"""Ranking: the best candidate of each type and purchase option, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.performance.types import Floats
from optimizer.request import FleetRequest
from optimizer.search.candidates import CandidateTable

# Plans that an answer lists at most.
MAX_PLANS = 20


class Position(NamedTuple):
    """A candidate: index of its table, and its row."""

    table: int
    row: int


class Ranking(NamedTuple):
    """The best candidate of each type and option, best first, and the Pareto front, cheapest first."""

    best: list[Position]
    pareto: list[Position]


def rank(tables: Sequence[CandidateTable], request: FleetRequest) -> Ranking:
    """Rank the feasible candidates of tables that each have one."""
    best: list[tuple[tuple[float, ...], Position]] = []
    fronts: list[Position] = []
    for index, table in enumerate(tables):
        feasible = np.flatnonzero(table.feasible(request.constraints))
        names = sorted({purchase.option for purchase in table.purchases})
        options = np.array([names.index(purchase.option) for purchase in table.purchases])[table.purchase[feasible]]
        for option in range(len(names)):
            rows = feasible[options == option]
            if rows.size:
                hours, usd = table.outcome.hours_expected[rows], table.cost.expected[rows]
                keys = [hours, usd] if request.objective == "time" else [usd, hours]
                keys.append(table.fastest.nodes[table.configuration[rows]])
                first = int(np.lexsort(keys[::-1])[0])
                best.append((tuple(float(key[first]) for key in keys), Position(index, int(rows[first]))))
        front = pareto_front(table.outcome.hours_expected[feasible], table.cost.expected[feasible])
        fronts += [Position(index, int(row)) for row in feasible[front]]
    best.sort()
    hours = np.array([tables[table].outcome.hours_expected[row] for table, row in fronts])
    usd = np.array([tables[table].cost.expected[row] for table, row in fronts])
    return Ranking([position for _, position in best[:MAX_PLANS]], [fronts[i] for i in pareto_front(hours, usd)])


def rank_first(tables: Sequence[CandidateTable], request: FleetRequest) -> tuple[CandidateTable, int] | None:
    """The best candidate of all tables by the request's objective, as table and row; None where none is feasible."""
    feasible = [table for table in tables if table.feasible(request.constraints).any()]
    best = rank(feasible, request).best[:1]
    return (feasible[best[0].table], best[0].row) if best else None


def pareto_front(hours: Floats, usd: Floats) -> NDArray[np.intp]:
    """Indices of the candidates that no other beats in both hours and dollars, cheapest first."""
    order = np.lexsort((hours, usd))
    fastest = np.minimum.accumulate(np.concatenate(([np.inf], hours[order][:-1])))
    return order[hours[order] < fastest]
