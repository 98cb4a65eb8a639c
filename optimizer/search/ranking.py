"""Ranking: the best candidate of each type and purchase option, and the Pareto front.

Candidates tie where they differ by less than the estimate's error; the simplest of them is the best. A GPU that was
measured heads one that was not, where it saves more at the 95th percentile than it costs more on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bootstrap.contract import trainer
from optimizer.contract.request import FleetRequest
from optimizer.performance.types import Floats
from optimizer.search.candidates import CandidateTable
from optimizer.search.layouts import SPLITS
from optimizer.search.purchases import PricedPurchase

# Plans that an answer lists at most.
MAX_PLANS = 20
# Share of the hours that a dearer plan of the front must save at least: answers show four digits.
_SAME_HOURS = 0.001
# Largest difference that ties for the error of a GPU: its layouts share most of that.
MOST_TIE = 0.1
# Hours of a tie's winner over those of the cheapest, the error aside: half the nodes take twice the hours for the same
# dollars. A quarter would save few nodes more, and take twice as long again.
MOST_TIMES_AS_LONG = 2.0
# Bits of SPLITS that the reference trainer has none of.
_BEYOND_TRAINER = sum(1 << bit for bit, name in enumerate(SPLITS) if name not in trainer.SPLITS)


class Position(NamedTuple):
    """A candidate: index of its table, and its row."""

    table: int
    row: int


class Ranking(NamedTuple):
    """The best candidate of each type and option, best first, and the Pareto front, cheapest first.

    The first is at a current price, where any is: the least of many old spot prices is the likeliest to have risen.
    Where all are old, the 95th percentile ranks.
    ``passed_over`` has the nominally better candidate that a best one ties with.
    """

    best: list[Position]
    pareto: list[Position]
    passed_over: dict[Position, Position]


class _Best(NamedTuple):
    """The best of a type and option; ``nominal`` ignores ties, ``p95`` is of the objective.

    ``risked`` has dollars and a time objective's hours, each the mean and the 95th percentile together, and the nodes'
    doublings.
    """

    order: tuple[float, ...]
    complexity: tuple[float, ...]
    hours: float
    nominal_value: float
    nominal_hours: float
    p95: float
    risked: tuple[float, ...]
    tie: float
    position: Position
    nominal: Position


def rank(tables: Sequence[CandidateTable], request: FleetRequest) -> Ranking:
    """Rank the feasible candidates of tables that each have one."""
    best: list[_Best] = []
    fronts: list[Position] = []
    for index, table in enumerate(tables):
        feasible = np.flatnonzero(table.feasible(request.constraints))
        # Old and current spot prices compete each with their own kind.
        names = sorted({(purchase.option, purchase.stale) for purchase in table.purchases})
        kinds = [names.index((purchase.option, purchase.stale)) for purchase in table.purchases]
        options = np.array(kinds)[table.purchase[feasible]]
        for option in range(len(names)):
            rows = feasible[options == option]
            if rows.size:
                best.append(_choose(index, table, rows, request.objective))
        front = pareto_front(table.outcome.hours_expected[feasible], table.cost.expected[feasible])
        fronts += [Position(index, int(row)) for row in feasible[front]]
    leaders = [one for one in best if not purchase_at(tables, one.position).stale]
    old = not leaders
    if old:  # the 95th percentile has the spread of a price's age, and the expectation of the least has not
        leaders = best = [
            one._replace(order=(one.p95, *one.order), nominal_value=one.p95, nominal_hours=one.hours) for one in best
        ]
    best.sort(key=lambda one: one.order)
    leaders.sort(key=lambda one: one.order)
    passed_over = {one.position: one.nominal for one in best if one.nominal != one.position}
    if best:
        nominal = min(leaders, key=lambda one: one.nominal_value)
        tied = [
            one
            for one in leaders
            if one.order[0] <= (1 + nominal.tie) * nominal.nominal_value
            and one.hours <= _longest(nominal.nominal_hours, nominal.tie)
        ]
        first = min(tied, key=lambda one: (one.complexity, one.order))
        if first is not leaders[0]:
            passed_over[first.position] = nominal.position if old else nominal.nominal
        measured = _prefer_measured(first, leaders, tables, min(first.hours, nominal.nominal_hours))
        if measured is not first:
            passed_over[measured.position] = first.position
            first = measured
        best.remove(first)
        best.insert(0, first)
    hours = np.array([tables[table].outcome.hours_expected[row] for table, row in fronts])
    usd = np.array([tables[table].cost.expected[row] for table, row in fronts])
    kept: list[int] = []
    for i in pareto_front(hours, usd).tolist():
        if not kept or hours[i] < (1 - _SAME_HOURS) * hours[kept[-1]]:
            kept.append(i)
    return Ranking([one.position for one in best[:MAX_PLANS]], [fronts[i] for i in kept], passed_over)


def _prefer_measured(first: _Best, others: Sequence[_Best], tables: Sequence[CandidateTable], hours: float) -> _Best:
    """Return the best measured candidate that risks no more than an unmeasured ``first`` and is as simple, else it.

    The mean alone would take any estimate of an unmeasured GPU at its word, the 95th percentile alone would pay a fifth
    more for one percent of it.
    """
    table, row = first.position
    fastest = tables[table].fastest
    if fastest.measured:
        return first
    error = float(fastest.relative_error[tables[table].configuration[row]])
    limits = first.risked + first.complexity
    surer = [
        one
        for one in others
        if tables[one.position.table].fastest.measured
        and one.hours <= _longest(hours, error)
        and all(own <= its for own, its in zip(one.risked + one.complexity, limits, strict=True))
    ]
    return min(surer, key=lambda one: (one.complexity, one.order), default=first)


def _choose(index: int, table: CandidateTable, rows: NDArray[np.intp], objective: str) -> _Best:
    """Choose the simplest of the rows that tie with the best by the objective."""
    fastest, configuration = table.fastest, table.configuration[rows]
    hours, usd = table.outcome.hours_expected[rows], table.cost.expected[rows]
    # The knee (docs/economics.md): a percent of the hours may cost two percent of the dollars.
    value, other = (usd * hours**2, hours) if objective == "time" else (usd, hours)
    hours_p95, usd_p95 = table.outcome.hours_p95[rows], table.cost.p95[rows]
    p95 = usd_p95 * hours_p95**2 if objective == "time" else usd_p95
    nodes, splits = fastest.nodes[configuration], fastest.layouts.splits[configuration]
    spot = np.array([purchase.option == "spot" for purchase in table.purchases])[table.purchase[rows]]
    # Twelve nodes are no simpler than eleven; two are than one. More nodes are how a time objective is met.
    doublings = np.ceil(np.log2(nodes))
    risked: tuple[Floats, ...] = (usd + usd_p95, doublings)
    if objective == "time":
        risked, doublings = (*risked, hours + hours_p95), np.zeros(nodes.size)
    complexity = (np.bitwise_count(splits & _BEYOND_TRAINER), np.bitwise_count(splits), doublings, spot)
    order = (value, other, nodes)
    nominal = int(np.lexsort(order[::-1])[0])
    # An error above the type's least is of splits that no run measured: no simpler layout shares that.
    tie = float(fastest.relative_error[configuration[nominal]])
    if tie <= fastest.relative_error.min():
        tie = min(tie, MOST_TIE)
    tied = np.flatnonzero((value <= (1 + tie) * value[nominal]) & (hours <= _longest(hours[nominal], tie)))
    first = int(tied[np.lexsort([key[tied] for key in (*complexity, *order)[::-1]])[0]])
    return _Best(
        order=tuple(float(key[first]) for key in order),
        complexity=tuple(float(key[first]) for key in complexity),
        hours=float(hours[first]),
        nominal_value=float(value[nominal]),
        nominal_hours=float(hours[nominal]),
        p95=float(p95[first]),
        risked=tuple(float(key[first]) for key in risked),
        tie=tie,
        position=Position(index, int(rows[first])),
        nominal=Position(index, int(rows[nominal])),
    )


def _longest(hours: float, error: float) -> float:
    """Most hours of a candidate that wins a tie with one of ``hours``."""
    return MOST_TIMES_AS_LONG * (1 + error) * hours


def purchase_at(tables: Sequence[CandidateTable], position: Position) -> PricedPurchase:
    """Return the purchase of a candidate."""
    table = tables[position.table]
    return table.purchases[int(table.purchase[position.row])]


def list_chosen(ranking: Ranking, tables: Sequence[CandidateTable], request: FleetRequest) -> list[Position]:
    """Candidates of the answer's plans, in their order."""
    if request.objective != "pareto":
        return ranking.best
    front = ranking.pareto
    if front and purchase_at(tables, front[0]).stale:
        return list(dict.fromkeys([*ranking.best[:1], *front]))
    return front


def rank_first(tables: Sequence[CandidateTable], request: FleetRequest) -> tuple[CandidateTable, int] | None:
    """The answer's first candidate of all tables, as table and row; None where none is feasible."""
    feasible = [table for table in tables if table.feasible(request.constraints).any()]
    first = list_chosen(rank(feasible, request), feasible, request)[:1]
    return (feasible[first[0].table], first[0].row) if first else None


def pareto_front(hours: Floats, usd: Floats) -> NDArray[np.intp]:
    """Indices of the candidates that no other beats in both hours and dollars, cheapest first."""
    order = np.lexsort((hours, usd))
    fastest = np.minimum.accumulate(np.concatenate(([np.inf], hours[order][:-1])))
    return order[hours[order] < fastest]
