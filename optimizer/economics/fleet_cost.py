"""Dollars of fleets from their hours, elementwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from optimizer.contract.units import HOURS_PER_MONTH, HOURS_PER_YEAR
from optimizer.economics.outcome import Outcome, lognormal_percentiles
from optimizer.performance.types import Bools, Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Bought:
    """Purchases of fleets, a fleet an element of each array; ``spot``, ``committed`` and ``fallback`` are 0 or 1.

    Attributes:
        base: nodes on demand beside spot ones.
        rented: nodes on demand beside owned ones.
        usd_per_hour: price of a node that is neither.
        p95_usd_per_hour: its 95th percentile, above it for an old spot price.
        on_demand_usd_per_hour: 0 where there is none.
        market_after_hours: hours in Capacity Blocks, after which all nodes are on demand; infinite for others.
    """

    nodes: Floats
    base: Floats
    rented: Floats
    spot: Floats
    committed: Floats
    fallback: Bools
    usd_per_hour: Floats
    p95_usd_per_hour: Floats
    on_demand_usd_per_hour: Floats
    market_after_hours: Floats

    @property
    def spot_nodes(self) -> Floats:
        """Nodes on the spot market."""
        return self.spot * (self.nodes - self.base)


@dataclass(frozen=True, kw_only=True, slots=True)
class HourlyRates:
    """Nodes of fleets with the price of one, running costs and drain reserve.

    Base nodes are never reclaimed; committed nodes are of a one-year commitment made for this run.
    """

    base_nodes: Floats
    base_usd_per_hour: Floats
    spot_nodes: Floats
    spot_usd_per_hour: Floats
    committed_nodes: Floats
    committed_usd_per_hour: Floats
    volume_usd_per_month: Floats
    storage_usd_per_month: Floats
    endpoints_usd_per_hour: Floats
    controller_usd_per_hour: Floats
    reserve_hours: Floats
    copy_usd: Floats  # requests of one node's copy of the data
    carry_usd: Floats  # for one node's copy out of the data's region
    checkpoint_usd: Floats  # of one checkpoint

    @classmethod
    def of(cls, bought: Bought, **others: Floats) -> Self:
        """Return the rates of fleets by how their nodes are bought; ``others`` are the other fields."""
        spot, nodes = bought.spot, bought.nodes
        # All nodes of a topped-up fleet count at their mean price.
        mean_usd = bought.usd_per_hour + (bought.on_demand_usd_per_hour - bought.usd_per_hour) * bought.rented / nodes
        return cls(
            base_nodes=np.where(spot > 0, bought.base, nodes * (1 - bought.committed)),
            base_usd_per_hour=np.where(spot > 0, bought.on_demand_usd_per_hour, mean_usd),
            spot_nodes=bought.spot_nodes,
            spot_usd_per_hour=bought.usd_per_hour,
            committed_nodes=bought.committed * nodes,
            committed_usd_per_hour=bought.usd_per_hour,
            **others,
        )

    @property
    def nodes_usd_per_hour(self) -> Floats:
        """Price of all nodes by the hour."""
        return (
            self.base_nodes * self.base_usd_per_hour
            + self.spot_nodes * self.spot_usd_per_hour
            + self.committed_nodes * self.committed_usd_per_hour
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCost:
    """USD of whole runs; ``expected`` sums the parts before it, and ``reserve`` is not spent."""

    compute: Floats
    volumes: Floats
    storage: Floats
    transfer: Floats
    head_node: Floats
    expected: Floats
    p50: Floats
    p95: Floats
    reserve: Floats


def run_cost(outcome: Outcome, rates: HourlyRates, bought: Bought) -> FleetCost:
    """Cost of runs, with what a fallback and old spot prices add."""
    on_demand, fallback = bought.on_demand_usd_per_hour, bought.fallback
    # Spot nodes of fleets that fall back are priced at the mean of spot and on-demand over the run.
    mean = outcome.spot_share * rates.spot_usd_per_hour + (1 - outcome.spot_share) * on_demand
    cost = fleet_cost(outcome, replace(rates, spot_usd_per_hour=np.where(fallback, mean, rates.spot_usd_per_hour)))
    if (bought.p95_usd_per_hour > bought.usd_per_hour).any():
        cost = _widen(cost, fleet_cost(outcome, replace(rates, spot_usd_per_hour=bought.p95_usd_per_hour)))
    if fallback.any():
        # Limits bind a run that gets no spot node.
        all_on_demand = np.where(fallback, on_demand, bought.usd_per_hour)
        dearer = fleet_cost(outcome, replace(rates, spot_usd_per_hour=all_on_demand))
        cost = replace(cost, p95=np.maximum(cost.p95, dearer.p95), reserve=np.maximum(cost.reserve, dearer.reserve))
    if np.isfinite(bought.market_after_hours).any():
        cost = _add_market(cost, outcome, rates, bought)
    return cost


def _add_market(cost: FleetCost, outcome: Outcome, rates: HourlyRates, bought: Bought) -> FleetCost:
    """Add the on-demand nodes of the hours that Capacity Blocks do not hold."""
    usd = bought.nodes * (bought.on_demand_usd_per_hour - bought.usd_per_hour)
    with np.errstate(invalid="ignore"):
        expected, p50, p95 = (
            np.where(hours > bought.market_after_hours, usd * (hours - bought.market_after_hours), 0.0)
            for hours in (outcome.hours_expected, outcome.hours_p50, outcome.hours_p95)
        )
    return replace(
        cost,
        compute=cost.compute + expected,
        expected=cost.expected + expected,
        p50=cost.p50 + p50,
        p95=cost.p95 + p95,
        reserve=cost.reserve + np.where(p95 > 0, usd * rates.reserve_hours, 0.0),
    )


def _widen(cost: FleetCost, at_p95_price: FleetCost) -> FleetCost:
    """Add the spread of old spot prices to the 95th percentile; ``at_p95_price`` has the prices' own 95th percentile.

    Price and hours err independently, so the logs of their surcharges add up as squares.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.hypot(np.log(cost.p95 / cost.expected), np.log(at_p95_price.expected / cost.expected))
        wider = cost.expected * np.exp(logs)
    return replace(cost, p95=np.where(at_p95_price.expected > cost.expected, wider, cost.p95))


def fleet_cost(outcome: Outcome, rates: HourlyRates) -> FleetCost:
    """Cost of runs; while the job waits for a reclaimed node, every other node is paid.

    A one-year commitment costs whole years (https://aws.amazon.com/ec2/pricing/reserved-instances/).
    """
    fleet_usd_per_hour = rates.base_nodes * rates.base_usd_per_hour + rates.spot_nodes * rates.spot_usd_per_hour
    with np.errstate(invalid="ignore"):
        waiting_usd = outcome.waiting_hours * (fleet_usd_per_hour - rates.spot_usd_per_hour)
        years = np.ceil(outcome.hours_p95 / HOURS_PER_YEAR)
        committed_usd = rates.committed_nodes * rates.committed_usd_per_hour * HOURS_PER_YEAR * years
        # The product may be 0 x infinity.
        waiting = np.where(outcome.waiting_hours > 0, waiting_usd, 0.0)
        committed = np.where(rates.committed_nodes > 0, committed_usd, 0.0)
        hourly = fleet_usd_per_hour * outcome.running_hours + waiting
        nodes = rates.base_nodes + rates.spot_nodes + rates.committed_nodes
        months = outcome.hours_expected / HOURS_PER_MONTH
        volumes = nodes * rates.volume_usd_per_month * months
        copies = np.where(np.isfinite(outcome.new_nodes), nodes + outcome.new_nodes, np.inf)
        requests, carried = (
            np.where(np.asarray(usd) > 0, copies * usd, 0.0) for usd in (rates.copy_usd, rates.carry_usd)
        )
        saved = np.where(np.asarray(rates.checkpoint_usd) > 0, outcome.checkpoints * rates.checkpoint_usd, 0.0)
        storage = rates.storage_usd_per_month * months + requests + saved
        transfer = rates.endpoints_usd_per_hour * outcome.hours_expected + carried
        head_node = rates.controller_usd_per_hour * outcome.hours_expected
        varying = hourly + volumes + storage + transfer + head_node
        p50, p95 = lognormal_percentiles(varying, varying * outcome.hours_std / outcome.hours_expected)
        p50 = np.fmax(p50, varying * (outcome.hours_p50 / outcome.hours_expected))
        monthly = nodes * rates.volume_usd_per_month + rates.storage_usd_per_month
        # A commitment's year pays for its nodes' drain.
        all_usd_per_hour = (
            fleet_usd_per_hour
            + monthly / HOURS_PER_MONTH
            + rates.endpoints_usd_per_hour
            + rates.controller_usd_per_hour
        )
    return FleetCost(
        compute=hourly + committed,
        volumes=volumes,
        storage=storage,
        transfer=transfer,
        head_node=head_node,
        expected=varying + committed,
        p50=p50 + committed,
        p95=p95 + committed,
        reserve=all_usd_per_hour * rates.reserve_hours,
    )
