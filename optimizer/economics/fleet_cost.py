"""Dollars of fleets from their hours, elementwise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optimizer.contract.units import HOURS_PER_MONTH, HOURS_PER_YEAR
from optimizer.economics.outcome import Outcome, lognormal_percentiles
from optimizer.performance.types import Bools, Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Bought:
    """Purchases of fleets, a fleet an element of each array, with the prices of what they run.

    Attributes:
        base: nodes on demand beside spot ones, which are never reclaimed.
        rented: nodes on demand beside owned ones.
        spot, fallback: 0 or 1.
        committed: 1 for a one-year commitment made for this run.
        usd_per_hour: price of a node that is neither base nor rented.
        p95_usd_per_hour: its 95th percentile, above it for an old spot price.
        on_demand_usd_per_hour: 0 where there is none.
        market_after_hours: hours in Capacity Blocks, after which all nodes are on demand; infinite for others.
        reserve_hours: drain reserve.
        copy_usd, carry_usd: requests of one node's copy of the data, and for it out of the data's region.
        checkpoint_usd: of one checkpoint.
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
    volume_usd_per_month: Floats
    storage_usd_per_month: Floats
    endpoints_usd_per_hour: Floats
    controller_usd_per_hour: Floats
    reserve_hours: Floats
    copy_usd: Floats
    carry_usd: Floats
    checkpoint_usd: Floats

    @property
    def spot_nodes(self) -> Floats:
        """Nodes on the spot market."""
        return self.spot * (self.nodes - self.base)

    @property
    def committed_usd_per_hour(self) -> Floats:
        """Price of all nodes of a commitment."""
        return self.committed * self.nodes * self.usd_per_hour

    def fleet_usd_per_hour(self, spot_usd_per_hour: Floats) -> Floats:
        """Price of all nodes without a commitment; all nodes of a topped-up fleet count at their mean price."""
        mean_usd = self.usd_per_hour + (self.on_demand_usd_per_hour - self.usd_per_hour) * self.rented / self.nodes
        base_usd = np.where(
            self.spot > 0, self.base * self.on_demand_usd_per_hour, self.nodes * (1 - self.committed) * mean_usd
        )
        return base_usd + self.spot_nodes * spot_usd_per_hour


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


def run_cost(outcome: Outcome, bought: Bought) -> FleetCost:
    """Cost of runs, with what a fallback and old spot prices add."""
    on_demand, fallback = bought.on_demand_usd_per_hour, bought.fallback
    # Spot nodes of fleets that fall back are priced at the mean of spot and on-demand over the run.
    mean = outcome.spot_share * bought.usd_per_hour + (1 - outcome.spot_share) * on_demand
    cost = _fleet_cost(outcome, bought, np.where(fallback, mean, bought.usd_per_hour))
    if (bought.p95_usd_per_hour > bought.usd_per_hour).any():
        cost = _widen(cost, _fleet_cost(outcome, bought, bought.p95_usd_per_hour))
    if fallback.any():
        # Limits bind a run that gets no spot node.
        dearer = _fleet_cost(outcome, bought, np.where(fallback, on_demand, bought.usd_per_hour))
        cost = replace(cost, p95=np.maximum(cost.p95, dearer.p95), reserve=np.maximum(cost.reserve, dearer.reserve))
    if np.isfinite(bought.market_after_hours).any():
        cost = _add_market(cost, outcome, bought)
    return cost


def add_gap(
    outcome: Outcome, cost: FleetCost, bought: Bought, closes: Floats, hours: Floats
) -> tuple[Outcome, FleetCost]:
    """Add ``hours`` without nodes after ``closes`` to runs that are not over; all but the nodes' compute is paid."""
    ends = {name: getattr(outcome, f"hours_{name}") for name in ("expected", "p50", "p95")}
    waits = {name: np.where(end > closes, hours, 0.0) for name, end in ends.items()}
    usd_per_hour = {
        "volumes": bought.nodes * bought.volume_usd_per_month / HOURS_PER_MONTH,
        "storage": bought.storage_usd_per_month / HOURS_PER_MONTH,
        "transfer": bought.endpoints_usd_per_hour,
        "head_node": bought.controller_usd_per_hour,
    }
    added = {part: usd * waits["expected"] for part, usd in usd_per_hour.items()}
    added |= {name: sum(usd_per_hour.values()) * wait for name, wait in waits.items()}
    longer = {f"hours_{name}": end + waits[name] for name, end in ends.items()}
    return (
        replace(outcome, lost_hours=outcome.lost_hours + waits["expected"], **longer),
        replace(cost, **{part: getattr(cost, part) + usd for part, usd in added.items()}),
    )


def _add_market(cost: FleetCost, outcome: Outcome, bought: Bought) -> FleetCost:
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
        reserve=cost.reserve + np.where(p95 > 0, usd * bought.reserve_hours, 0.0),
    )


def _widen(cost: FleetCost, at_p95_price: FleetCost) -> FleetCost:
    """Add the spread of old spot prices to the 95th percentile; ``at_p95_price`` has the prices' own 95th percentile.

    Price and hours err independently, so the logs of their surcharges add up as squares.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.hypot(np.log(cost.p95 / cost.expected), np.log(at_p95_price.expected / cost.expected))
        wider = cost.expected * np.exp(logs)
    return replace(cost, p95=np.where(at_p95_price.expected > cost.expected, wider, cost.p95))


def _fleet_cost(outcome: Outcome, bought: Bought, spot_usd_per_hour: Floats) -> FleetCost:
    """Cost of runs; while the job waits for a reclaimed node, every other node is paid.

    A one-year commitment costs whole years (https://aws.amazon.com/ec2/pricing/reserved-instances/).
    """
    nodes, fleet_usd_per_hour = bought.nodes, bought.fleet_usd_per_hour(spot_usd_per_hour)
    with np.errstate(invalid="ignore"):
        waiting_usd = outcome.waiting_hours * (fleet_usd_per_hour - spot_usd_per_hour)
        years = np.ceil(outcome.hours_p95 / HOURS_PER_YEAR)
        committed_usd = bought.committed_usd_per_hour * HOURS_PER_YEAR * years
        # The product may be 0 x infinity.
        waiting = np.where(outcome.waiting_hours > 0, waiting_usd, 0.0)
        committed = np.where(bought.committed > 0, committed_usd, 0.0)
        hourly = fleet_usd_per_hour * outcome.running_hours + waiting
        months = outcome.hours_expected / HOURS_PER_MONTH
        volumes = nodes * bought.volume_usd_per_month * months
        copies = np.where(np.isfinite(outcome.new_nodes), nodes + outcome.new_nodes, np.inf)
        requests, carried = (
            np.where(np.asarray(usd) > 0, copies * usd, 0.0) for usd in (bought.copy_usd, bought.carry_usd)
        )
        saved = np.where(np.asarray(bought.checkpoint_usd) > 0, outcome.checkpoints * bought.checkpoint_usd, 0.0)
        storage = bought.storage_usd_per_month * months + requests + saved
        transfer = bought.endpoints_usd_per_hour * outcome.hours_expected + carried
        head_node = bought.controller_usd_per_hour * outcome.hours_expected
        varying = hourly + volumes + storage + transfer + head_node
        p50, p95 = lognormal_percentiles(varying, varying * outcome.hours_std / outcome.hours_expected)
        p50 = np.fmax(p50, varying * (outcome.hours_p50 / outcome.hours_expected))
        monthly = nodes * bought.volume_usd_per_month + bought.storage_usd_per_month
        # A commitment's year pays for its nodes' drain.
        all_usd_per_hour = (
            fleet_usd_per_hour
            + monthly / HOURS_PER_MONTH
            + bought.endpoints_usd_per_hour
            + bought.controller_usd_per_hour
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
        reserve=all_usd_per_hour * bought.reserve_hours,
    )
