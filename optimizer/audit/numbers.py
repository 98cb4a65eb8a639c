"""Numbers of a plan, worked out again from its nodes, steps and prices by the search's own economics.

A plan of this version agrees to the digits that it is written with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from optimizer.audit.facts import Fault
from optimizer.catalog import Catalog, UnitPrice
from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.region_transfer import transfer_price
from optimizer.contract.plan import FleetPlan, Market
from optimizer.economics.checkpoint import interval_s
from optimizer.economics.fleet_cost import Bought, FleetCost, HourlyRates, run_cost
from optimizer.economics.outcome import Outcome, predict_outcome
from optimizer.economics.planned import (
    column,
    describe_cost,
    describe_hours,
    describe_interruption,
    describe_lustre,
    describe_staging,
    fleets_of,
    planned_checkpoints,
)
from optimizer.economics.running_costs import RATES, RunningCosts, reserve_hours, running_costs
from optimizer.economics.staging import disk_gib, node_copy

# Plans have six significant digits, and dollars have cents.
DIGITS = 1e-4
CENTS = 0.011

_LIMITS = "gpufleet recommend with --budget and --deadline as you want them, or another --plan N"

# Formulas of the numbers, by the beginning of their field.
_WHY = {
    "job.tokens": "job.samples x job.seq_len",
    "tokens_per_second": "job.global_batch x job.seq_len in step_time_s",
    "memory.peak_gib": "the sum of memory.breakdown",
    "step_time_s": "the sum of step_breakdown_s",
    "hours": "job.steps x step_time_s with the plan's interruptions and error of the speed",
    "interruption.checkpoint": "node_count, job.checkpoint_gib, interruption.rate and the plan's prices",
    "interruption": "GPU failures and reclaims of spot over node_count and the hours",
    "staging": "staging.data_gib to these nodes, at the plan's prices",
    "lustre": "lustre.storage_gib over hours.expected at the plan's prices",
    "cost_usd.expected": "the sum of cost_usd.breakdown",
    "cost_usd": "node_count, hours, data and checkpoints at the plan's prices",
}


def check_numbers(plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    """Compare each derived number of ``plan`` with those it follows from; unit prices that it lacks are the catalog's.

    Not compared are numbers that are only shown (``mfu``, ``job.parameters``, ``calibration.rows``).
    """
    job, staging = plan.job, plan.staging
    with np.errstate(all="ignore"):  # an absurd number gives infinite hours, which are no plan's
        outcome = predict_outcome(fleets_of(plan))
    yield from _compare(
        plan,
        {
            "job": {"tokens": job.samples * job.seq_len},
            "tokens_per_second": job.global_batch * job.seq_len / plan.step_time_s,
            "memory": {"peak_gib": sum(plan.memory.breakdown.values())},
            "step_time_s": sum(plan.step_breakdown_s.values()) if plan.step_breakdown_s else plan.step_time_s,
        },
    )
    if not math.isfinite(outcome.hours_p95[0]):
        yield _unequal("hours.p95", plan.hours.p95, math.inf)
        return
    if staging and (space := disk_gib(plan.node, plan.volumes)) < staging.data_gib:
        yield _unequal("staging.data_gib", staging.data_gib, space)
    bought = _bought(plan)
    if bought is None:
        yield Fault(
            field="prices",
            value="without one of the nodes by the hour",
            limit=f"the {plan.purchase.option} price of {plan.instance_type} in {plan.region}",
            why="nobody could meter these nodes",
        )
        return
    cost, numbers = _work_out(plan, outcome, bought, _running_costs(plan, catalog))
    yield from _compare(plan, numbers)
    yield from _check_p95(plan, outcome, cost, float(bought.usd_per_hour[0]))
    yield from _check_limits(plan, float(cost.reserve[0]))


def _work_out(plan: FleetPlan, outcome: Outcome, bought: Bought, usd: RunningCosts) -> tuple[FleetCost, dict[str, Any]]:
    """Work out a plan's dollars, and its numbers by field."""
    staging, lustre = plan.staging, plan.lustre
    copy = staging and node_copy(
        plan.instance_type, plan.node, plan.volumes, data_gib=staging.data_gib, files=staging.files
    )
    writers = 1 if plan.parallelism.sharding == "ddp" else plan.node_count
    rates = HourlyRates.of(
        bought,
        reserve_hours=reserve_hours(plan.step_time_s, plan.job.checkpoint_gib, writers).reshape(1),
        copy_usd=column(copy.requests * usd.read_request_usd if copy else 0.0),
        **{name: column(getattr(usd, name)) for name in RATES},
    )
    cost = run_cost(outcome, rates, bought)
    saves = planned_checkpoints(plan, usd.checkpoint_usd)
    chosen_s = interval_s(saves, column(plan.interruption.rate * plan.node_count), rates.nodes_usd_per_hour)
    interruption = describe_interruption(
        replace(outcome, checkpoint_interval_s=chosen_s), saves, 0, nodes=plan.node_count, hazard=None
    )
    numbers = {
        "hours": describe_hours(outcome, 0),
        # A higher 95th percentile only keeps limits more strictly.
        "cost_usd": dict(describe_cost(cost, 0)) | {"expected": plan.cost_usd.breakdown.total(), "p95": None},
        "interruption": interruption,
        "staging": describe_staging(copy, usd, outcome, cost, 0, nodes=plan.node_count) if copy else None,
        "lustre": lustre and describe_lustre(usd, lustre.storage_gib, lustre.data_gib, plan.hours.expected),
    }
    return cost, numbers


def _compare(plan: FleetPlan, numbers: Mapping[str, Any]) -> Iterator[Fault]:
    for field, value, expected in _pairs(plan, numbers):
        cents = CENTS if "usd" in field and not field.startswith("interruption") else 0.0
        if not math.isclose(value, expected, rel_tol=DIGITS, abs_tol=cents):
            yield _unequal(field, value, expected)


def _pairs(stated: BaseModel, derived: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float, float]]:
    """Yield the numbers that both have, by their path."""
    for name, expected in derived.items():
        value = getattr(stated, name)
        if isinstance(expected, BaseModel):
            yield from _pairs(value, dict(expected), f"{path}{name}.")
        elif isinstance(expected, Mapping):
            yield from _pairs(value, expected, f"{path}{name}.")
        elif isinstance(expected, int | float) and value is not None:  # null: a plan of an earlier version
            yield f"{path}{name}", value, expected


def _unequal(field: str, value: float, expected: float) -> Fault:
    why = next(why for begins, why in _WHY.items() if field.startswith(begins))
    return Fault(field=field, value=f"{value:.6g}", limit=f"{expected:.6g}", why=why)


def _bought(plan: FleetPlan) -> Bought | None:
    """Return the purchase of a plan's nodes at the plan's prices, or None where the price of a node is missing."""
    purchase = plan.purchase
    own_type = {node: usd for node, usd in plan.node_prices_usd_per_hour.items() if node[1] == plan.instance_type}
    usd = {node.market: price for node, price in own_type.items()}
    markets: tuple[Market, ...] = ("owned-reservation", "reserved-1yr", "on-demand")
    if purchase.option != "reserved":
        markets = (purchase.option,)
    own = next((usd[market] for market in markets if market in usd), None)
    if own is None or (purchase.needs_on_demand_price and "on-demand" not in usd):
        return None
    return Bought(
        nodes=column(plan.node_count),
        base=column(purchase.on_demand_base),
        rented=column(purchase.on_demand_top_up),
        spot=column(purchase.option == "spot"),
        committed=column(purchase.option == "reserved" and "reserved-1yr" in usd),
        fallback=np.array([purchase.fallback == "on-demand"]),
        usd_per_hour=column(own),
        p95_usd_per_hour=column(own),
        on_demand_usd_per_hour=column(usd.get("on-demand", 0.0)),
    )


def _running_costs(plan: FleetPlan, catalog: Catalog) -> RunningCosts:
    """Running costs at the plan's unit prices, and the catalog's where it has none."""
    prices = {(price.item, price.region): price for price in catalog.unit_prices}
    for price in plan.prices:
        for item in UNIT_ITEMS:
            if price.item == f"{item} {plan.region}":
                prices[item, plan.region] = UnitPrice(
                    item=item, region=plan.region, usd=price.usd, source=price.source, as_of=price.as_of
                )
    staging, data = plan.staging, plan.staging or plan.lustre
    data_region = staging.data_region if staging else None
    carry = data_region and transfer_price(data_region, plan.region).item
    return running_costs(
        replace(catalog, unit_prices=tuple(prices.values())),
        plan.region,
        plan.job.checkpoint_gib,
        volumes=plan.volumes,
        kept=plan.job.checkpoints_kept,
        data_gib=data.data_gib if data else 0.0,
        data_region=data_region,
        lustre_gib=plan.lustre.storage_gib if plan.lustre else 0,
        carry_usd_per_gb=next((price.usd for price in plan.prices if price.item == carry), None),
    )


def _check_p95(plan: FleetPlan, outcome: Outcome, cost: FleetCost, node_usd: float) -> Iterator[Fault]:
    stated, p95 = plan.cost_usd.p95, float(cost.p95[0])
    spot = [usd for node, usd in plan.node_prices_usd_per_hour.items() if node.market == "spot"]
    if plan.purchase.spot_types and spot:
        dearest = max(spot) / node_usd - 1
        p95 += max(0.0, dearest) * float(cost.compute[0] * outcome.hours_p95[0] / outcome.hours_expected[0])
    if stated < p95 * (1 - DIGITS) - CENTS:
        yield Fault(
            field="cost_usd.p95",
            value=f"{stated:.2f}",
            limit=f"{p95:.2f} at least",
            why=f"the nodes' prices and hours.p95 {plan.hours.p95:g}",
        )


def _check_limits(plan: FleetPlan, reserve_usd: float) -> Iterator[Fault]:
    job, needed = plan.job, plan.cost_usd.p95 + reserve_usd
    if job.budget_usd is not None and needed > job.budget_usd * (1 + DIGITS) + CENTS:
        yield Fault(
            field="job.budget_usd",
            value=f"{job.budget_usd:.2f}",
            limit=f"{needed:.2f} at least",
            why=f"the run costs {plan.cost_usd.p95:.2f} at the 95th percentile, and {reserve_usd:.2f} are kept to save "
            "and end; at the budget the controller ends the fleet before the run is done",
            next_step=_LIMITS,
        )
    if job.deadline_hours is not None and plan.hours.p95 > job.deadline_hours * (1 + DIGITS):
        yield Fault(
            field="job.deadline_hours",
            value=f"{job.deadline_hours:g}",
            limit=f"{plan.hours.p95:g} at least",
            why="hours.p95, the run's 95th percentile",
            next_step=_LIMITS,
        )
