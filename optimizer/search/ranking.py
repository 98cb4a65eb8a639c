"""Ranking by one score, dollars x hours^a: plans at current prices first, the lowest score first (docs/economics.md).

Symbols:
    dollars: mean of a candidate's expected cost and its 95th percentile, USD, and hour_usd for each of its hours.
    hours: mean of its expected hours and their 95th percentile, at least SHORTEST_HOURS.
    a: EXPONENTS of the objective; what hours are worth.
Of a type's scores within SAME of its lowest, fewer kinds of parallelism win, then fewer nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.contract.request import FleetRequest
from optimizer.performance.types import Floats
from optimizer.search.candidates import Candidate, CandidateTable
from optimizer.search.fastest import SAME
from optimizer.search.layouts import split_bits

# Twice as fast is worth 3.5% of the dollars to objective cost, and four times the dollars to objective time.
EXPONENTS = {"cost": 0.05, "pareto": 0.05, "time": 2.0}
# Hours below a quarter are worth no more: nodes take about as long to start.
SHORTEST_HOURS = 0.25
# Plans that an answer lists at most.
MAX_PLANS = 20
# Share that a dearer plan of the front, or of least need, must save at least: answers show four digits.
SAME_SHOWN = 0.001


class Ranking(NamedTuple):
    """The candidates of the answer's plans, best first, and the Pareto front, cheapest first.

    The plans are the best candidate of each type and purchase option, or of objective pareto the best, then the front.
    ``faster`` and ``cheaper``, at current prices, beat both the first's mean and its expected hours or dollars.
    """

    best: list[Candidate]
    pareto: list[Candidate]
    faster: Candidate | None = None
    cheaper: Candidate | None = None


def rank(tables: Sequence[CandidateTable], request: FleetRequest) -> Ranking:
    """Rank the feasible candidates of the tables."""
    candidates, columns = list[Candidate](), list[Sequence[NDArray[Any]]]()
    for table in tables:
        rows, outcome, cost = np.flatnonzero(table.feasible(request.constraints)), table.outcome, table.cost
        candidates += [Candidate(table, row) for row in rows.tolist()]
        kinds = np.bitwise_count(split_bits(table.fastest.columns))[table.configuration]
        ends = (outcome.hours_expected, outcome.hours_p95, cost.expected, cost.p95)
        columns.append([column[rows] for column in (*ends, kinds, table.nodes, table.stale)])
    if not candidates:
        return Ranking([], [])
    hours, hours_p95, usd, usd_p95, kinds, nodes, stale = map(np.concatenate, zip(*columns, strict=True))
    mean_hours, mean_usd = (hours + hours_p95) / 2, (usd + usd_p95) / 2

    def pick(group: Collection[int], values: Floats) -> int:
        limit = (1 + SAME) * min(values[i] for i in group)
        return min((i for i in group if values[i] <= limit), key=lambda i: (kinds[i], nodes[i], values[i]))

    groups: dict[tuple[CandidateTable, str, float], list[int]] = {}
    for i, candidate in enumerate(candidates):
        groups.setdefault((candidate.table, candidate.purchase.option, stale[i]), []).append(i)
    score = scores(request, mean_usd, mean_hours)
    best = sorted((pick(group, score) for group in groups.values()), key=lambda i: (stale[i], score[i]))
    first, shown = best[0], best[:MAX_PLANS]
    # Plans at old spot prices are last; the best that may save stays in, for the answer's line on spot is of it.
    saves = [i for i in best if stale[i] and usd[i] < usd[first]]
    if saves and not any(stale[i] for i in shown):
        shown[-1] = saves[0]
    front: list[int] = []
    for i in pareto_front(hours, usd).tolist():
        if not front or hours[i] < (1 - SAME_SHOWN) * hours[front[-1]]:
            front.append(i)
    by_time = scores(request.model_copy(update={"objective": "time"}), mean_usd, mean_hours)
    faster = np.flatnonzero(~stale & (mean_hours < (1 - SAME) * mean_hours[first]) & (hours < hours[first]))
    cheaper = np.flatnonzero(~stale & (mean_usd < (1 - SAME) * mean_usd[first]) & (usd < usd[first]))
    return Ranking(
        best=[candidates[i] for i in (dict.fromkeys([first, *front]) if request.objective == "pareto" else shown)],
        pareto=[candidates[i] for i in front],
        faster=candidates[pick(faster, by_time)] if faster.size else None,
        cheaper=candidates[cheaper[mean_usd[cheaper].argmin()]] if cheaper.size else None,
    )


def scores(request: FleetRequest, usd: Floats, hours: Floats) -> Floats:
    """Return the scores of candidates, lower is better; ``usd`` and ``hours`` are means of expected and p95."""
    return (usd + request.hour_usd * hours) * np.maximum(hours, SHORTEST_HOURS) ** EXPONENTS[request.objective]


def rank_first(tables: Sequence[CandidateTable], request: FleetRequest) -> Candidate | None:
    """The answer's first candidate of all tables; None where none is feasible."""
    return next(iter(rank(tables, request).best), None)


def pareto_front(hours: Floats, usd: Floats) -> NDArray[np.intp]:
    """Indices of the candidates that no other beats in both hours and dollars, cheapest first."""
    order = np.lexsort((hours, usd))
    fastest = np.minimum.accumulate(np.concatenate(([np.inf], hours[order][:-1])))
    return order[hours[order] < fastest]
