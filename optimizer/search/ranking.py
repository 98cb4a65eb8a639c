"""Ranking by one score, dollars x hours^a: plans at current prices first, the lowest score first (docs/economics.md).

Symbols:
    dollars: mean of a candidate's expected cost and its 95th percentile, USD, and hour_usd for each of its hours.
    hours: mean of its expected hours and their 95th percentile, at least SHORTEST_HOURS.
    a: EXPONENTS of the objective; what hours are worth.
Of a type's scores within SAME of its lowest, fewer kinds of parallelism win, then fewer nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Of the candidates at current prices that beat the first in hours, ``faster`` is the best by the score of objective
    time; of those that beat it in dollars, ``cheaper`` costs least. None where there is none. A candidate beats it by
    the mean that is scored, and by the expected value, which people read first.
    """

    best: list[Candidate]
    pareto: list[Candidate]
    faster: Candidate | None = None
    cheaper: Candidate | None = None


def rank(tables: Sequence[CandidateTable], request: FleetRequest) -> Ranking:
    """Rank the feasible candidates of the tables."""
    rows = [np.flatnonzero(table.feasible(request.constraints)) for table in tables]
    candidates = [Candidate(table, int(row)) for table, chosen in zip(tables, rows, strict=True) for row in chosen]
    if not candidates:
        return Ranking([], [])

    def column(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([value[chosen] for value, chosen in zip(values, rows, strict=True)])

    usd, hours = column([table.cost.expected for table in tables]), column([t.outcome.hours_expected for t in tables])
    mean_usd = (usd + column([table.cost.p95 for table in tables])) / 2
    mean_hours = (hours + column([table.outcome.hours_p95 for table in tables])) / 2
    score = scores(request, mean_usd, mean_hours)
    kinds = column([np.bitwise_count(split_bits(t.fastest.columns)[t.configuration]) for t in tables])
    nodes, stale = column([table.nodes for table in tables]), column([table.stale for table in tables])

    def pick(group: Sequence[int], values: Floats = score) -> int:
        limit = (1 + SAME) * min(values[i] for i in group)
        return min((i for i in group if values[i] <= limit), key=lambda i: (kinds[i], nodes[i], values[i]))

    groups: dict[tuple[CandidateTable, str, bool], list[int]] = {}
    for i, (candidate, is_old) in enumerate(zip(candidates, stale.tolist(), strict=True)):
        groups.setdefault((candidate.table, candidate.purchase.option, is_old), []).append(i)
    best = sorted((pick(group) for group in groups.values()), key=lambda i: (stale[i], score[i]))
    first = best[0]
    # Plans at old spot prices are last; the best that may save stays in, for the answer's line on spot is of it.
    if not stale[first] and (saves := [i for i in best[MAX_PLANS:] if stale[i] and usd[i] < usd[first]]):
        best = [*best[: MAX_PLANS - 1], saves[0]] if not stale[best[MAX_PLANS - 1]] else best
    front: list[int] = []
    for i in pareto_front(hours, usd).tolist():
        if not front or hours[i] < (1 - SAME_SHOWN) * hours[front[-1]]:
            front.append(i)

    def beating(mean: Floats, expected: Floats) -> list[int]:
        beats = ~stale & (mean < (1 - SAME) * mean[first]) & (expected < expected[first])
        return np.flatnonzero(beats).tolist()

    shown = best[:MAX_PLANS] if request.objective != "pareto" else dict.fromkeys([first, *front])
    by_time = scores(request.model_copy(update={"objective": "time"}), mean_usd, mean_hours)
    faster, cheaper = beating(mean_hours, hours), beating(mean_usd, usd)
    return Ranking(
        best=[candidates[i] for i in shown],
        pareto=[candidates[i] for i in front],
        faster=candidates[pick(faster, by_time)] if faster else None,
        cheaper=candidates[min(cheaper, key=lambda i: mean_usd[i])] if cheaper else None,
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
