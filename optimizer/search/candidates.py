"""Candidates: the fastest configurations of each type, crossed with every purchase, with their hours and dollars.

A fleet's cost rises with its hours, so the fastest configuration is best at every price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.contract.request import Constraints
from optimizer.economics.checkpoint import CheckpointTimes, checkpoints
from optimizer.economics.fleet_cost import Bought, FleetCost, add_gap, run_cost
from optimizer.economics.outcome import Fleets, Outcome, predict_outcome
from optimizer.economics.running_costs import RunningCosts, reserve_hours
from optimizer.performance.types import DDP, Bools, Floats, Ints, take_rows
from optimizer.search.fastest import Fastest, find_fastest
from optimizer.search.problem import Binding, Problem, Rejection
from optimizer.search.purchases import PricedPurchase, find_purchases

_RATES = {field.name for field in fields(RunningCosts)} & {field.name for field in fields(Bought)}


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
        budget, deadline = limits.budget_usd or math.inf, limits.deadline_hours or math.inf
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
        if not self.nodes.size:
            fewest = int(self.fastest.nodes.min())
            owned = max(purchase.reservation.count for purchase in self.purchases if purchase.reservation)
            reason = f"the fewest nodes of {name} that the training fits on are {fewest}, more than are reserved"
            return Rejection(name, reason, "memory", fewest, owned)
        hours, usd = self.outcome.hours_p95, self.cost.p95 + self.cost.reserve
        if not np.isfinite(hours).any():
            reason = "spot nodes are lost faster than the job recovers"
            return Rejection(name, reason, "interruptions", float(self.outcome.rate.min()), None)
        missing = hours - np.where(np.isfinite(hours), available_hours, 0.0)
        if not (missing <= 0).any():
            closest = int(missing.argmin())
            available, needed = float(available_hours[closest]), float(hours[closest])
            reason = (
                f"the fastest run takes {needed:,.1f} h at the 95th percentile, and of the Capacity Block "
                f"{available:,.1f} h are left to train in"
            )
            return Rejection(name, reason, "capacity-block", needed, available)
        hours, usd = hours[missing <= 0], usd[missing <= 0]
        budget, deadline = limits.budget_usd, limits.deadline_hours
        on_time, is_paid = hours <= (deadline or math.inf), usd <= (budget or math.inf)
        soonest = float((hours[is_paid] if is_paid.any() else hours).min())
        within = f" within {budget:,.2f} USD" if soonest > hours.min() else ""
        late = f"takes {soonest:,.1f} h at the 95th percentile, the deadline is {deadline or 0:,.1f} h"
        if is_paid.any() and not on_time.any():
            return Rejection(name, f"the fastest run{within} {late}", "deadline", soonest, deadline)
        assert budget is not None  # without it, the deadline alone decided
        least = float((usd[on_time] if on_time.any() else usd).min())
        within = f" within {deadline:,.1f} h" if least > usd.min() else ""
        reason = (
            f"the cheapest run{within} needs {least:,.2f} USD at the 95th percentile, with its drain, the budget is "
            f"{budget:,.2f} USD"
        )
        if not on_time.any():
            reason += f"; the fastest {late}"
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
    def stale(self) -> Bools:
        """Mask of the candidates at a spot price that is older than its limit."""
        old: Bools = np.array([purchase.stale for purchase in self.purchases])[self.purchase]
        return old

    @property
    def _available_hours(self) -> Floats:
        hours: Floats = np.array([math.inf if it.fallback else it.hours for it in self.purchases])[self.purchase]
        return np.maximum(hours - self.reserve_hours, 0.0)


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


def find_candidates(problem: Problem) -> tuple[list[CandidateTable], list[Rejection]]:
    """Find the candidates of each of the problem's types, feasible or not, and why types have none that is."""
    found = {instance.name: find_purchases(problem, instance) for instance in problem.instance_types}
    purchases = {name: options for name, options in found.items() if not isinstance(options, Rejection)}
    bought = [instance for instance in problem.instance_types if instance.name in purchases]
    fastest = dict(zip(purchases, find_fastest(problem, bought), strict=True))
    tables, rejected = [], []
    for name, options in found.items():
        result: Fastest | Rejection | Sequence[PricedPurchase] | None = fastest.get(name, options)
        if isinstance(result, Fastest):
            tables.append(build_table(problem, result, purchases[name]))
            result = tables[-1].reject(problem.request.constraints)
        if isinstance(result, Rejection):
            rejected.append(result)
    return tables, rejected


def build_table(problem: Problem, fastest: Fastest, purchases: Sequence[PricedPurchase]) -> CandidateTable:
    """Cross the configurations of a type with its purchases; compute the hours and dollars of all."""
    configuration, purchase = np.indices((fastest.nodes.size, len(purchases))).reshape(2, -1)

    def column(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=float)[purchase]

    owned = column([p.reservation.count if p.reservation else math.inf for p in purchases])
    base = column([p.base for p in purchases])
    topped_up = column([p.topped_up for p in purchases]) > 0
    nodes = fastest.nodes[configuration]
    keep = ((nodes > owned) == topped_up) & ((base == 0) | (nodes > base))
    rented = np.where(topped_up, nodes - owned, 0)[keep]
    configuration, purchase, base, nodes = configuration[keep], purchase[keep], base[keep], nodes[keep].astype(float)
    layouts, is_whole = fastest.columns, fastest.columns["sharding"] == DDP
    # One node writes the last state of DDP, which every rank holds whole, as in FleetPlan.
    step_s = fastest.train_hours * 3600 / problem.amount.steps
    last_writers = np.where(is_whole, 1, fastest.nodes)
    end_hours = reserve_hours(step_s, problem.checkpoint_gib, last_writers)[configuration]
    market_after = column([p.hours - sum(gap for _, gap in p.gaps) if p.fallback else math.inf for p in purchases])
    running = [problem.running_costs(p.offer.region) for p in purchases]
    copy = problem.node_copy(fastest.instance.name)
    bought = Bought(
        nodes=nodes,
        base=base,
        rented=rented,
        spot=column([p.option == "spot" for p in purchases]),
        committed=column([p.committed for p in purchases]),
        fallback=column([p.fallback and p.option == "spot" for p in purchases]) > 0,
        usd_per_hour=column([p.price.usd_per_hour for p in purchases]),
        p95_usd_per_hour=column([p.p95_usd_per_hour for p in purchases]),
        on_demand_usd_per_hour=column([p.offer.on_demand.usd_per_hour if p.offer.on_demand else 0 for p in purchases]),
        market_after_hours=market_after - end_hours * column([1 + len(p.gaps) for p in purchases]),
        reserve_hours=end_hours,
        copy_usd=column([copy.requests * usd.read_request_usd if copy else 0.0 for usd in running]),
        **{name: column([getattr(usd, name) for usd in running]) for name in _RATES},
    )
    gpus_per_node = np.full(nodes.size, float(fastest.instance.ranks))
    saves = checkpoints(
        problem.checkpoint_gib,
        problem.recipe.framework,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        writers=np.where(is_whole, np.minimum(fastest.nodes, layouts["pipeline"]), fastest.nodes)[configuration],
        usd=bought.checkpoint_usd,
    )
    outcome = predict_outcome(
        Fleets(
            train_hours=fastest.train_hours[configuration],
            log_error=fastest.relative_error[configuration],
            nodes=nodes,
            spot_nodes=bought.spot_nodes,
            gpus_per_node=gpus_per_node,
            spot_rate=column([p.hazard.rate_per_node_hour if p.hazard else 0 for p in purchases]),
            spot_wait_hours=column([p.hazard.wait_hours if p.hazard else 0 for p in purchases]),
            checkpoints=saves,
            usd_per_hour=bought.fleet_usd_per_hour(bought.usd_per_hour) + bought.committed_usd_per_hour,
            fallback=bought.fallback,
            staging_hours=np.full(nodes.size, copy.hours if copy else 0.0),
        )
    )
    cost = run_cost(outcome, bought)
    for k in range(max(len(p.gaps) for p in purchases)):
        gaps = [p.gaps[k] if k < len(p.gaps) else (math.inf, 0.0) for p in purchases]
        closes, hours = (column(values) for values in zip(*gaps, strict=True))
        outcome, cost = add_gap(outcome, cost, bought, closes - end_hours, hours + end_hours)
    return CandidateTable(
        fastest=fastest,
        purchases=tuple(purchases),
        configuration=configuration,
        purchase=purchase,
        outcome=outcome,
        cost=cost,
        reserve_hours=end_hours,
        checkpoints=saves,
    )


def list_cheapest(tables: Iterable[CandidateTable], limits: Constraints) -> dict[str, list[Any]]:
    """List one candidate a type, node count and purchase option, as columns.

    It is the cheapest that keeps the limits, else the cheapest. ``excluded_by`` names the limits that it breaks, with
    commas; hours and dollars are None where spot nodes are lost faster than the job recovers.
    """
    rows = [row for table in tables for row in _cheapest_rows(table, limits)]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _cheapest_rows(table: CandidateTable, limits: Constraints) -> Iterable[dict[str, Any]]:
    masks = table.excluded_by(limits)
    excluded = ~table.feasible(limits)
    nodes, options = table.nodes, np.array([purchase.option for purchase in table.purchases])[table.purchase]
    order = np.lexsort((table.cost.expected, excluded, options, nodes))
    begins = (np.diff(nodes[order], prepend=0) > 0) | (options[order] != np.roll(options[order], 1))
    numbers = {
        "hours_expected": table.outcome.hours_expected,
        "hours_p95": table.outcome.hours_p95,
        "cost_usd_expected": table.cost.expected,
        "cost_usd_p95": table.cost.p95,
    }
    for row in order[begins].tolist():
        yield {
            "instance_type": table.fastest.instance.name,
            "node_count": int(nodes[row]),
            "purchase_option": str(options[row]),
            "region": Candidate(table, row).purchase.offer.region,
            **{n: float(f"{values[row]:.4g}") if np.isfinite(values[row]) else None for n, values in numbers.items()},
            "excluded_by": ",".join(name for name, mask in masks.items() if mask[row]),
        }
