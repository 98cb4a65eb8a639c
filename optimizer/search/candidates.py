"""Candidates: the fastest configurations of each type, crossed with every purchase, with their hours and dollars.

A fleet's cost rises with its hours, so the fastest configuration is best at every price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.contract.request import Constraints
from optimizer.economics.checkpoint import CheckpointTimes, checkpoints
from optimizer.economics.fleet_cost import Bought, FleetCost, HourlyRates, run_cost
from optimizer.economics.outcome import Fleets, Outcome, predict_outcome
from optimizer.economics.running_costs import RATES
from optimizer.performance.types import Bools, Floats, Ints, take_rows
from optimizer.search.fastest import Fastest, find_fastest
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase, find_purchases
from optimizer.search.rejections import Binding, Rejection

# With fewer types, numpy's calls dominate; with more, arrays miss the cache.
_TYPES_TOGETHER = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateTable:
    """The candidates of one type; ``configuration`` and ``purchase`` are indices in the first two fields."""

    fastest: Fastest
    purchases: tuple[PricedPurchase, ...]
    configuration: NDArray[np.intp]
    purchase: NDArray[np.intp]
    outcome: Outcome
    cost: FleetCost
    reserve_hours: Floats
    checkpoints: CheckpointTimes

    def feasible(self, limits: Constraints) -> Bools:
        """Mask of the candidates that keep the limits and end before their capacity does."""
        return np.asarray(~np.any([*self.excluded_by(limits).values()], axis=0))

    def excluded_by(self, limits: Constraints) -> dict[Binding, Bools]:
        """Masks of the candidates that break each limit at the 95th percentile; the budget pays the drain too."""
        budget = math.inf if limits.budget_usd is None else limits.budget_usd
        deadline = math.inf if limits.deadline_hours is None else limits.deadline_hours
        hours = self.outcome.hours_p95
        endless = ~np.isfinite(hours)
        return {
            "interruptions": endless,
            "deadline": (hours > deadline) & ~endless,
            "budget": ~(self.cost.p95 + self.cost.reserve <= budget) & ~endless,
            "capacity-block": hours > self._available_hours,
        }

    def reject(self, limits: Constraints) -> Rejection | None:
        """Say which limit all candidates break at the 95th percentile; None where one keeps them."""
        if self.feasible(limits).any():
            return None
        name, available_hours = self.fastest.instance.name, self._available_hours
        hours, usd = self.outcome.hours_p95, self.cost.p95 + self.cost.reserve
        if not np.isfinite(hours).any():
            reason = "spot nodes are lost faster than the job recovers"
            return Rejection(name, reason, "interruptions", float(self.outcome.rate.min()), None)
        in_time = hours <= available_hours
        if not in_time.any():
            closest = int((hours - available_hours).argmin())
            available, needed = float(available_hours[closest]), float(hours[closest])
            reason = (
                f"the fastest run takes {needed:,.1f} h at the 95th percentile, and of the Capacity Block "
                f"{available:,.1f} h are left to train in"
            )
            return Rejection(name, reason, "capacity-block", needed, available)
        hours, usd = hours[in_time], usd[in_time]
        budget, deadline = limits.budget_usd, limits.deadline_hours
        is_cheap = budget is None or bool((usd <= budget).any())
        if is_cheap and deadline is not None and not (hours <= deadline).any():
            reason = (
                f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h"
            )
            return Rejection(name, reason, "deadline", float(hours.min()), deadline)
        assert budget is not None  # without it, the deadline alone decided
        least, within = float(usd.min()), ""
        if is_cheap and deadline is not None:  # both limits can be kept, but not together
            least, within = float(usd[hours <= deadline].min()), f" within {deadline:,.1f} h"
        reason = (
            f"the cheapest run{within} needs {least:,.2f} USD at the 95th percentile, with its drain, the budget is "
            f"{budget:,.2f} USD"
        )
        return Rejection(name, reason, "budget", least, budget)

    def keep(self, rows: NDArray[np.intp]) -> CandidateTable:
        """Return the table with these rows alone."""
        return replace(
            self,
            configuration=self.configuration[rows],
            purchase=self.purchase[rows],
            outcome=take_rows(self.outcome, rows),
            cost=take_rows(self.cost, rows),
            reserve_hours=self.reserve_hours[rows],
            checkpoints=take_rows(self.checkpoints, rows),
        )

    @property
    def nodes(self) -> Ints:
        """Node count of each candidate."""
        return self.fastest.nodes[self.configuration]

    @property
    def options(self) -> NDArray[np.str_]:
        """Purchase option of each candidate."""
        return np.array([purchase.option for purchase in self.purchases])[self.purchase]

    @property
    def stale(self) -> Bools:
        """Mask of the candidates at a spot price that is older than its limit."""
        old: Bools = np.array([purchase.stale for purchase in self.purchases])[self.purchase]
        return old

    @property
    def _available_hours(self) -> Floats:
        hours: Floats = np.array([math.inf if it.fallback else it.hours for it in self.purchases])[self.purchase]
        saves = np.array([1 + len(purchase.following) for purchase in self.purchases])[self.purchase]
        return np.maximum(hours - saves * self.reserve_hours, 0.0)


class Candidate(NamedTuple):
    """A fleet that may run the training: a row of its type's table."""

    table: CandidateTable
    row: int

    @property
    def configuration(self) -> int:
        """Index in ``table.fastest``."""
        return int(self.table.configuration[self.row])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.table.fastest.nodes[self.configuration])

    @property
    def purchase(self) -> PricedPurchase:
        """Way in which the nodes are bought."""
        return self.table.purchases[int(self.table.purchase[self.row])]

    @property
    def fleet(self) -> str:
        """Nodes and their type: "8 x p4d.24xlarge"."""
        return f"{self.nodes} x {self.table.fastest.instance.name}"


def find_candidates(problem: Problem) -> list[CandidateTable | Rejection]:
    """Find all candidates of each of the problem's types, feasible or not."""
    instances = {instance.name: instance for instance in problem.instance_types}
    purchases = {name: find_purchases(problem, instance) for name, instance in instances.items()}
    bought = {name: found for name, found in purchases.items() if not isinstance(found, Rejection)}
    fastest = dict(zip(bought, find_fastest(problem, [instances[name] for name in bought]), strict=True))
    types = [(found, bought[name]) for name, found in fastest.items() if isinstance(found, Fastest)]
    batches = (types[start : start + _TYPES_TOGETHER] for start in range(0, len(types), _TYPES_TOGETHER))
    tables = chain.from_iterable(build_tables(problem, batch) for batch in batches)
    results = (fastest.get(name, found) for name, found in purchases.items())
    return [found if isinstance(found, Rejection) else next(tables) for found in results]


def find_tables(problem: Problem) -> list[CandidateTable]:
    """Find the candidates as ``find_candidates``, without the rejections."""
    return [result for result in find_candidates(problem) if isinstance(result, CandidateTable)]


def build_tables(problem: Problem, types: Sequence[tuple[Fastest, Sequence[PricedPurchase]]]) -> list[CandidateTable]:
    """Cross each type's configurations with its purchases; compute hours and dollars of all types at once."""
    configurations = [fastest for fastest, _ in types]
    purchases = [purchase for _, options in types for purchase in options]
    first_configuration = np.cumsum([0, *(fastest.nodes.size for fastest in configurations)]).tolist()
    first_purchase = np.cumsum([0, *(len(options) for _, options in types)]).tolist()
    crossed = [np.indices((fastest.nodes.size, len(options))).reshape(2, -1) for fastest, options in types]
    configuration = np.concatenate([pair[0] + first for pair, first in zip(crossed, first_configuration, strict=False)])
    purchase = np.concatenate([pair[1] + first for pair, first in zip(crossed, first_purchase, strict=False)])

    def by_configuration(values: Sequence[NDArray[Any]]) -> Floats:
        column: Floats = np.concatenate(values)[configuration]
        return column

    def by_purchase(values: Sequence[float]) -> Floats:
        column: Floats = np.array(values, dtype=float)[purchase]
        return column

    owned = by_purchase([p.reservation.count if p.reservation else math.inf for p in purchases])
    base = by_purchase([p.base for p in purchases])
    nodes = by_configuration([fastest.nodes for fastest in configurations])
    topped_up = by_purchase([p.topped_up for p in purchases]) > 0
    keep = ((nodes > owned) == topped_up) & ((base == 0) | (nodes > base))
    rented = np.where(topped_up, nodes - owned, 0)[keep]
    configuration, purchase, base, nodes = configuration[keep], purchase[keep], base[keep], nodes[keep].astype(float)
    reserve_hours = by_configuration([fastest.reserve_hours(problem) for fastest in configurations])
    market_after = by_purchase([p.hours if p.fallback else math.inf for p in purchases])
    bought = Bought(
        nodes=nodes,
        base=base,
        rented=rented,
        spot=by_purchase([p.option == "spot" for p in purchases]),
        committed=by_purchase([p.committed for p in purchases]),
        fallback=by_purchase([p.fallback and p.option == "spot" for p in purchases]) > 0,
        usd_per_hour=by_purchase([p.price.usd_per_hour for p in purchases]),
        p95_usd_per_hour=by_purchase([p.p95_usd_per_hour for p in purchases]),
        on_demand_usd_per_hour=by_purchase(
            [p.offer.on_demand.usd_per_hour if p.offer.on_demand else 0 for p in purchases]
        ),
        market_after_hours=market_after - reserve_hours * by_purchase([1 + len(p.following) for p in purchases]),
    )
    copies = [problem.node_copy(p.offer.instance.name) for p in purchases]
    running = [problem.running_costs(p.offer.region) for p in purchases]
    rates = HourlyRates.of(
        bought,
        reserve_hours=reserve_hours,
        copy_usd=by_purchase(
            [copy.requests * usd.read_request_usd if copy else 0.0 for copy, usd in zip(copies, running, strict=True)]
        ),
        **{name: by_purchase([getattr(usd, name) for usd in running]) for name in RATES},
    )
    gpus_per_node = by_purchase([p.offer.instance.ranks for p in purchases])
    saves = checkpoints(
        problem.checkpoint_gib,
        problem.recipe.framework,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        writers=by_configuration([fastest.checkpoint_writers for fastest in configurations]),
        usd=rates.checkpoint_usd,
    )
    outcome = predict_outcome(
        Fleets(
            train_hours=by_configuration([fastest.train_hours for fastest in configurations]),
            log_error=by_configuration([fastest.relative_error for fastest in configurations]),
            nodes=nodes,
            spot_nodes=bought.spot_nodes,
            gpus_per_node=gpus_per_node,
            spot_rate=by_purchase([p.hazard.rate_per_node_hour if p.hazard else 0 for p in purchases]),
            spot_wait_hours=by_purchase([p.hazard.wait_hours if p.hazard else 0 for p in purchases]),
            checkpoints=saves,
            usd_per_hour=rates.nodes_usd_per_hour,
            fallback=bought.fallback,
            staging_hours=by_purchase([copy.hours if copy else 0.0 for copy in copies]),
        )
    )
    cost = run_cost(outcome, rates, bought)
    ends = np.searchsorted(configuration, first_configuration).tolist()
    tables = []
    for i, (fastest, options) in enumerate(types):
        rows = slice(ends[i], ends[i + 1])
        tables.append(
            CandidateTable(
                fastest=fastest,
                purchases=tuple(options),
                configuration=configuration[rows] - first_configuration[i],
                purchase=purchase[rows] - first_purchase[i],
                outcome=take_rows(outcome, rows),
                cost=take_rows(cost, rows),
                reserve_hours=reserve_hours[rows],
                checkpoints=take_rows(saves, rows),
            )
        )
    return tables


CHEAPEST_COLUMNS = (
    "instance_type",
    "node_count",
    "purchase_option",
    "region",
    "hours_expected",
    "hours_p95",
    "cost_usd_expected",
    "cost_usd_p95",
    "excluded_by",
)


def list_cheapest(tables: Iterable[CandidateTable], limits: Constraints) -> dict[str, list[Any]]:
    """List one candidate a type, node count and purchase option as ``CHEAPEST_COLUMNS``, each a list.

    It is the cheapest that keeps the limits, else the cheapest. ``excluded_by`` names the limits that it breaks, with
    commas; hours and dollars are None where spot nodes are lost faster than the job recovers.
    """
    rows = [row for table in tables for row in _cheapest_rows(table, limits)]
    return dict(zip(CHEAPEST_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}


def _cheapest_rows(table: CandidateTable, limits: Constraints) -> Iterable[tuple[Any, ...]]:
    masks = table.excluded_by(limits)
    excluded = ~table.feasible(limits)
    nodes, options = table.nodes, table.options
    order = np.lexsort((table.cost.expected, excluded, options, nodes))
    begins = (np.diff(nodes[order], prepend=0) > 0) | (options[order] != np.roll(options[order], 1))
    numbers = (table.outcome.hours_expected, table.outcome.hours_p95, table.cost.expected, table.cost.p95)
    for row in order[begins].tolist():
        yield (
            table.fastest.instance.name,
            int(nodes[row]),
            str(options[row]),
            table.purchases[int(table.purchase[row])].offer.region,
            *(float(f"{column[row]:.4g}") if np.isfinite(column[row]) else None for column in numbers),
            ",".join(name for name, mask in masks.items() if mask[row]),
        )
