"""Candidates: the fastest configuration of each type and node count, crossed with every way to pay for it.

The fastest configuration is best at every price, because a fleet's cost rises with its hours. Budget and deadline bind
the 95th percentile: a plan that is only expected to keep a limit breaks it every other time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.controller import reserve_hours
from optimizer.economics.fleet_cost import (
    FleetCost,
    Rates,
    fleet_cost,
)
from optimizer.economics.outcome import Candidates, Outcome, outcome
from optimizer.performance.types import DDP
from optimizer.request import Constraints
from optimizer.search.fastest import Fastest, fastest
from optimizer.search.problem import Problem
from optimizer.search.purchases import Purchase, ways_to_pay
from optimizer.search.rejections import Rejection, rejection

Floats = NDArray[np.float64]
Part = TypeVar("Part", Outcome, FleetCost)

# Types whose candidates are worked out together: fewer pay more for numpy's calls, more miss the cache.
_TYPES = 6


@dataclass(frozen=True, kw_only=True)
class Table:
    """All candidates of one type: each row a configuration of ``fastest`` paid for by one of ``purchases``.

    Attributes:
        fastest: the configurations.
        purchases: the ways to pay.
        config, purchase: of each candidate, its row in ``fastest`` and its place in ``purchases``.
        run, cost: hours and dollars of each candidate.
        reserve_hours: what the controller keeps to end the nodes of each in.
    """

    fastest: Fastest
    purchases: tuple[Purchase, ...]
    config: NDArray[np.intp]
    purchase: NDArray[np.intp]
    run: Outcome
    cost: FleetCost
    reserve_hours: Floats

    @classmethod
    def of(cls, problem: Problem, types: Sequence[tuple[Fastest, Sequence[Purchase]]]) -> list[Self]:
        """Cross configurations with ways to pay, type by type, and work out hours and dollars of each pair.

        The candidates of all types are worked out together: each has few, and the calls are most of the time.

        Args:
            problem: what is trained, and the prices.
            types: the configurations of each, and the ways to pay for them.
        """
        if not types:
            return []
        found, ways = [fastest for fastest, _ in types], [way for _, some in types for way in some]
        configs = np.cumsum([0, *(fastest.nodes.size for fastest in found)]).tolist()
        first_way = np.cumsum([0, *(len(some) for _, some in types)]).tolist()
        # Of each candidate, the positions among the configurations and the ways of all types.
        crossed = [np.indices((fastest.nodes.size, len(some))).reshape(2, -1) for fastest, some in types]
        config = np.concatenate([pair[0] + first for pair, first in zip(crossed, configs, strict=False)])
        purchase = np.concatenate([pair[1] + first for pair, first in zip(crossed, first_way, strict=False)])

        def of_config(values: Sequence[NDArray[Any]]) -> Floats:
            column: Floats = np.concatenate(values)[config]
            return column

        def of_way(values: Sequence[float]) -> Floats:
            column: Floats = np.array(values, dtype=float)[purchase]
            return column

        owned = of_way([way.reservation.count if way.reservation else math.inf for way in ways])
        base, nodes = of_way([way.base for way in ways]), of_config([fastest.nodes for fastest in found])
        keep = (nodes <= owned) & ((base == 0) | (nodes > base))
        config, purchase, base, nodes = config[keep], purchase[keep], base[keep], nodes[keep].astype(float)
        spot = of_way([way.option == "spot" for way in ways])
        committed = of_way([way.committed for way in ways])
        size = problem.checkpoint_gib
        result = outcome(
            Candidates(
                train_hours=of_config([fastest.train_hours for fastest in found]),
                log_error=of_config([fastest.relative_error for fastest in found]),
                nodes=nodes,
                spot_nodes=spot * (nodes - base),
                gpus_per_node=of_way([way.offer.instance.ranks for way in ways]),
                spot_rate=of_way([way.hazard.rate_per_node_hour if way.hazard else 0 for way in ways]),
                spot_wait_hours=of_way([way.hazard.wait_hours if way.hazard else 0 for way in ways]),
                checkpoint_gib=np.full(nodes.size, size),
                checkpoint_writers=of_config([fastest.checkpoint_writers for fastest in found]),
            )
        )
        each = of_way([way.price.usd_per_hour for way in ways])
        on_demand = of_way([way.offer.on_demand.usd_per_hour if way.offer.on_demand else 0 for way in ways])
        running = [problem.running_costs(way.offer.region) for way in ways]
        bases = np.where(spot > 0, base, nodes * (1 - committed))
        reserve = of_config([reserve_hours_of(fastest, size) for fastest in found])
        rates = Rates(
            base_nodes=bases,
            base_usd_per_hour=np.where(spot > 0, on_demand, each),
            spot_nodes=spot * (nodes - base),
            spot_usd_per_hour=each,
            committed_nodes=committed * nodes,
            committed_usd_per_hour=each,
            volume_usd_per_month=of_way([usd.volume_usd_per_month for usd in running]),
            storage_usd_per_month=of_way([usd.storage_usd_per_month for usd in running]),
            endpoints_usd_per_hour=of_way([usd.endpoints_usd_per_hour for usd in running]),
            controller_usd_per_hour=of_way([usd.controller_usd_per_hour for usd in running]),
            reserve_hours=reserve,
        )
        cost = fleet_cost(result, rates)
        fallback = of_way([way.fallback for way in ways])
        if fallback.any():
            # How often spot does not come is nobody's to say, so the limits bind a run that never got any.
            without = replace(rates, spot_usd_per_hour=np.where(fallback > 0, on_demand, each))
            dearer = fleet_cost(result, without)
            cost = replace(
                cost,
                p95=np.maximum(cost.p95, dearer.p95),
                reserve=np.maximum(cost.reserve, dearer.reserve),
            )
        tables = []
        ends = np.searchsorted(config, configs).tolist()
        for at, (of_type, some) in enumerate(types):
            mine = slice(ends[at], ends[at + 1])
            tables.append(
                cls(
                    fastest=of_type,
                    purchases=tuple(some),
                    config=config[mine] - configs[at],
                    purchase=purchase[mine] - first_way[at],
                    run=part_of(result, mine),
                    cost=part_of(cost, mine),
                    reserve_hours=reserve[mine],
                )
            )
        return tables

    def feasible(self, limits: Constraints) -> NDArray[np.bool_]:
        """Which candidates keep budget and deadline, and end before their capacity does, at the 95th percentile."""
        return keeps_limits(self.run, self.cost, limits) & (self.run.hours_p95 <= self._hours_had())

    def _hours_had(self) -> Floats:
        had: Floats = np.array([way.hours for way in self.purchases])[self.purchase]
        return np.maximum(had - self.reserve_hours, 0.0)

    def rejection(self, limits: Constraints) -> Rejection:
        """Why no candidate keeps the limits: the one that binds, the nearest value to it, and the limit."""
        hours, cost = self.run.hours_p95, self.cost.p95 + self.cost.reserve
        name = self.fastest.instance.name
        if not np.isfinite(hours).any():
            worst = float(self.run.rate.min())
            return rejection(name, "interruptions", "spot nodes are lost faster than the job recovers", worst, None)
        budget, deadline = limits.budget_usd, limits.deadline_hours
        had = self._hours_had()
        in_time = hours <= had
        if not in_time.any():
            closest = int((hours - had).argmin())
            longest, nearest = float(had[closest]), float(hours[closest])
            return rejection(
                name,
                "capacity-block",
                f"the fastest run takes {nearest:,.1f} h at the 95th percentile, and of the Capacity Block "
                f"{longest:,.1f} h are left to train in",
                nearest,
                longest,
            )
        hours, cost = hours[in_time], cost[in_time]
        if budget is not None and not (cost <= budget).any():
            return rejection(
                name,
                "budget",
                f"the cheapest run needs {cost.min():,.2f} USD at the 95th percentile, with its drain, "
                f"the budget is {budget:,.2f} USD",
                float(cost.min()),
                budget,
            )
        assert deadline is not None  # without it, the budget alone decided
        if not (hours <= deadline).any():
            return rejection(
                name,
                "deadline",
                f"the fastest run takes {hours.min():,.1f} h at the 95th percentile, the deadline is {deadline:,.1f} h",
                float(hours.min()),
                deadline,
            )
        assert budget is not None  # both limits can be kept, but not together
        cheapest = float(cost[hours <= deadline].min())
        return rejection(
            name,
            "budget",
            f"the cheapest run within {deadline:,.1f} h needs {cheapest:,.2f} USD at the 95th percentile, with its "
            f"drain, the budget is {budget:,.2f} USD",
            cheapest,
            budget,
        )


def part_of(table: Part, at: int | slice) -> Part:
    """One row, or some, of a table of arrays."""
    return replace(table, **{field.name: getattr(table, field.name)[at] for field in fields(table)})


def reserve_hours_of(fastest: Fastest, size_gib: float) -> Floats:
    """What the controller keeps to end the nodes in, of each configuration, whose checkpoint has ``size_gib``."""
    # As FleetPlan has it: a state that every rank holds whole is written by one node.
    writers = np.where(fastest.sharding == DDP, 1, fastest.nodes)
    return reserve_hours(fastest.train_hours * 3600 / fastest.steps, size_gib, writers)


def keeps_limits(run: Outcome, cost: FleetCost, limits: Constraints) -> NDArray[np.bool_]:
    """Which fleets keep budget and deadline at the 95th percentile, the budget with what ends the fleet in time."""
    budget = math.inf if limits.budget_usd is None else limits.budget_usd
    deadline = math.inf if limits.deadline_hours is None else limits.deadline_hours
    return np.asarray(np.isfinite(run.hours_p95) & (run.hours_p95 <= deadline) & (cost.p95 + cost.reserve <= budget))


def pareto_front(hours: Floats, cost: Floats) -> NDArray[np.intp]:
    """Indices of the candidates no other beats in both hours and cost, cheapest first."""
    order = np.lexsort((hours, cost))
    best = np.minimum.accumulate(np.concatenate(([np.inf], hours[order][:-1])))
    return order[hours[order] < best]


def search_types(problem: Problem) -> list[Table | Rejection]:
    """All candidates of each type, or why it has none whatever the limits on money and time; in the types' order."""
    ways = [ways_to_pay(instance, problem) for instance in problem.instance_types]
    priced = [i for i, payable in zip(problem.instance_types, ways, strict=True) if isinstance(payable, list)]
    configured = iter(fastest(problem, priced))
    found = [next(configured) if isinstance(payable, list) else payable for payable in ways]
    types = [
        (of_type, payable)
        for of_type, payable in zip(found, ways, strict=True)
        if isinstance(of_type, Fastest) and isinstance(payable, list)
    ]
    batches = (types[at : at + _TYPES] for at in range(0, len(types), _TYPES))
    tables = chain.from_iterable(Table.of(problem, batch) for batch in batches)
    return [next(tables) if isinstance(of_type, Fastest) else of_type for of_type in found]
