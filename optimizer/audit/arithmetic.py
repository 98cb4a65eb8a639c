"""Hours, dollars, interruptions and speed of a plan, worked out again from its own nodes, steps and prices.

The economics are those of the search, so a plan of this version agrees to the digits that it is written with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bootstrap.contract.words import counted
from optimizer.audit.fault import AGAIN, Fault
from optimizer.catalog import Catalog, UnitPrice
from optimizer.catalog.model import UNIT_ITEMS
from optimizer.catalog.region_transfer import transfer_price, transfer_usd
from optimizer.contract.plan import FleetPlan, Market
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.economics.checkpoint import interval_s
from optimizer.economics.controller import reserve_hours
from optimizer.economics.fleet_cost import FleetCost, HourlyRates, fleet_cost, topped_up_usd_per_hour, with_fallback
from optimizer.economics.outcome import Outcome, predict_outcome
from optimizer.economics.planned import column, fleets_of, planned_checkpoints
from optimizer.economics.running_costs import running_costs
from optimizer.economics.staging import NodeCopy, disk_gib, node_copy

# Plans have six significant digits, and dollars have cents.
DIGITS = 1e-4
CENTS = 0.011

_LIMITS = "gpufleet recommend with --budget and --deadline as you want them, or another --plan N"


def check_arithmetic(plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    """Compare each derived number of ``plan`` with those it follows from; unit prices that it lacks are the catalog's.

    Not compared are numbers that are only shown (``mfu``, ``job.parameters``, ``calibration.rows``).
    """
    with np.errstate(all="ignore"):  # an absurd number gives infinite hours, which are no plan's
        outcome = predict_outcome(fleets_of(plan))
    yield from _check_work(plan)
    yield from _check_hours(plan, outcome)
    yield from _check_staging(plan, outcome)
    if not all(map(math.isfinite, outcome.hours_p95.flat)):
        return  # reported as hours
    prices = _hourly_prices(plan)
    if prices is None:
        yield Fault(
            field="prices",
            value="without one of the nodes by the hour",
            limit=f"the {plan.purchase.option} price of {plan.instance_type} in {plan.region}",
            why="nobody could meter these nodes",
            next_step=AGAIN,
        )
        return
    node_usd, on_demand_usd = prices
    rates = _rates(plan, catalog, node_usd, on_demand_usd)
    yield from _check_checkpoints(plan, rates)
    cost = _cost(plan, outcome, rates, on_demand_usd)
    yield from _check_dollars(plan, cost, outcome, node_usd, on_demand_usd)
    yield from _check_staging_dollars(plan, catalog, outcome)
    yield from _check_lustre_dollars(plan, catalog)
    yield from _check_limits(plan, cost)


def _differs(value: float, expected: float, absolute: float = 0.0) -> bool:
    return not math.isclose(value, expected, rel_tol=DIGITS, abs_tol=absolute)


def _unequal(field: str, value: float, expected: float, why: str) -> Fault:
    return Fault(field=field, value=f"{value:.6g}", limit=f"{expected:.6g}", why=why, next_step=AGAIN)


def _check_work(plan: FleetPlan) -> Iterator[Fault]:
    job, memory = plan.job, plan.memory
    if job.tokens != job.samples * job.seq_len:
        why = f"job.samples {job.samples} x job.seq_len {job.seq_len}"
        yield _unequal("job.tokens", job.tokens, job.samples * job.seq_len, why)
    speed = job.global_batch * job.seq_len / plan.step_time_s
    if _differs(plan.tokens_per_second, speed):
        why = f"job.global_batch {job.global_batch} x job.seq_len {job.seq_len} in step_time_s {plan.step_time_s:g}"
        yield _unequal("tokens_per_second", plan.tokens_per_second, speed, why)
    parts_gib = sum(memory.breakdown.values())
    if _differs(memory.peak_gib, parts_gib):
        yield _unequal("memory.peak_gib", memory.peak_gib, parts_gib, "the sum of memory.breakdown")
    parts_s = sum((plan.step_breakdown_s or {}).values())
    if plan.step_breakdown_s is not None and _differs(plan.step_time_s, parts_s):
        yield _unequal("step_time_s", plan.step_time_s, parts_s, "the sum of step_breakdown_s")


def _node_copy(plan: FleetPlan) -> NodeCopy | None:
    """One node's copy of the data, worked out again."""
    staging = plan.staging
    if staging is None:
        return None
    return node_copy(plan.instance_type, plan.node, plan.volumes, data_gib=staging.data_gib, files=staging.files)


def _check_staging(plan: FleetPlan, outcome: Outcome) -> Iterator[Fault]:
    staging, copy = plan.staging, _node_copy(plan)
    if staging is None or copy is None:
        return
    why = f"{staging.data_gib:g} GiB to {plan.instance_type}"
    if (space := disk_gib(plan.node, plan.volumes)) < staging.data_gib:
        yield _unequal("staging.data_gib", staging.data_gib, space, f"room on the disks of {plan.instance_type}")
    for field, value, expected in (
        ("node_hours", staging.node_hours, copy.hours),
        ("gib_per_s", staging.gib_per_s, copy.gib_per_s),
        ("hours", staging.hours, float(outcome.staging_hours[0])),
    ):
        if _differs(value, expected):
            yield _unequal(f"staging.{field}", value, expected, why)


def _check_hours(plan: FleetPlan, outcome: Outcome) -> Iterator[Fault]:
    hours, interruption, job = plan.hours, plan.interruption, plan.job
    run = (
        f"job.steps {job.steps} x step_time_s {plan.step_time_s:g} with the plan's interruptions and error of the speed"
    )
    fleet = f"{counted(plan.node_count, 'node')}, checkpoints of {job.checkpoint_gib:g} GiB, and the hours"
    rows = (
        ("hours.expected", hours.expected, outcome.hours_expected, run),
        ("hours.p50", hours.p50, outcome.hours_p50, run),
        ("hours.p95", hours.p95, outcome.hours_p95, run),
        ("interruption.rate", interruption.rate, outcome.rate / plan.node_count, "GPU failures, and reclaims of spot"),
        ("interruption.expected_count", interruption.expected_count, outcome.expected_count, f"its rate, {fleet}"),
        ("interruption.lost_hours", interruption.lost_hours, outcome.lost_hours, f"restarts and work redone, {fleet}"),
    )
    for field, value, expected, why in rows:
        if _differs(value, float(expected[0])):
            yield _unequal(field, value, float(expected[0]), why)


def _hourly_prices(plan: FleetPlan) -> tuple[float, float] | None:
    """Prices of the plan's own node as bought, and on demand (0 where the plan has none); None without the first."""
    usd = {node.market: price for node, price in plan.node_prices_usd_per_hour.items() if _is_own(plan, node[1])}
    markets: tuple[Market, ...]
    if plan.purchase.option == "reserved":
        markets = ("owned-reservation", "reserved-1yr", "on-demand")
    else:
        markets = (plan.purchase.option,)
    own = next((usd[market] for market in markets if market in usd), None)
    if own is None or (plan.purchase.needs_on_demand_price and "on-demand" not in usd):
        return None
    return own, usd.get("on-demand", 0.0)


def _is_own(plan: FleetPlan, instance_type: str) -> bool:
    return instance_type == plan.instance_type


def _check_checkpoints(plan: FleetPlan, rates: HourlyRates) -> Iterator[Fault]:
    interruption = plan.interruption
    saves = planned_checkpoints(plan, float(np.asarray(rates.checkpoint_usd).flat[0]))
    rate = column(interruption.rate * plan.node_count)
    fleet = f"{counted(plan.node_count, 'node')} and checkpoints of {plan.job.checkpoint_gib:g} GiB"
    rows = (
        ("interval_s", interval_s(saves, rate, rates.nodes_usd_per_hour), "the interval that loses least at its rate"),
        ("stall_s", saves.stall_s, "the copy's time"),
        ("save_s", saves.save_s, "the upload's time"),
        ("usd", saves.usd, "S3's requests and storage at the plan's prices"),
    )
    for field, expected, why in rows:
        value = getattr(interruption, f"checkpoint_{field}")
        if value is not None and _differs(value, float(expected[0])):
            yield _unequal(f"interruption.checkpoint_{field}", value, float(expected[0]), f"{why}, {fleet}")


def _rates(plan: FleetPlan, catalog: Catalog, node_usd: float, on_demand_usd: float) -> HourlyRates:
    """The fleet's rates at the given prices of a node and the plan's unit prices."""
    purchase, nodes, split = plan.purchase, plan.node_count, plan.parallelism
    markets = {node.market for node in plan.node_prices_usd_per_hour if _is_own(plan, node.instance_type)}
    spot = purchase.option == "spot"
    committed = purchase.option == "reserved" and "reserved-1yr" in markets
    base = purchase.on_demand_base if spot else 0 if committed else nodes
    data = plan.staging or plan.lustre
    usd = running_costs(
        _with_unit_prices(plan, catalog),
        plan.region,
        plan.job.checkpoint_gib,
        volumes=plan.volumes,
        kept=plan.job.checkpoints_kept,
        data_gib=data.data_gib if data else 0.0,
        lustre_gib=plan.lustre.storage_gib if plan.lustre else 0,
    )
    copy = _node_copy(plan)
    writers = 1 if split.sharding == "ddp" else nodes
    return HourlyRates(
        base_nodes=column(base),
        base_usd_per_hour=column(on_demand_usd)
        if spot
        else topped_up_usd_per_hour(
            column(node_usd), column(on_demand_usd), column(purchase.on_demand_top_up), column(nodes)
        ),
        spot_nodes=column(nodes - base if spot else 0),
        spot_usd_per_hour=column(node_usd),
        committed_nodes=column(nodes if committed else 0),
        committed_usd_per_hour=column(node_usd),
        volume_usd_per_month=column(usd.volume_usd_per_month),
        storage_usd_per_month=column(usd.storage_usd_per_month),
        endpoints_usd_per_hour=column(usd.endpoints_usd_per_hour),
        controller_usd_per_hour=column(usd.controller_usd_per_hour),
        reserve_hours=reserve_hours(plan.step_time_s, plan.job.checkpoint_gib, writers).reshape(1),
        copy_usd=column(copy.requests * usd.read_request_usd if copy else 0.0),
        carry_usd=column(_carry_usd(plan)),
        checkpoint_usd=column(usd.checkpoint_usd),
    )


def _cost(plan: FleetPlan, outcome: Outcome, rates: HourlyRates, on_demand_usd: float) -> FleetCost:
    """The run's dollars, without those of a fallback that comes."""
    falls_back = np.array([plan.purchase.fallback == "on-demand"])
    cost = fleet_cost(outcome, with_fallback(rates, outcome, falls_back, column(on_demand_usd)))
    if plan.purchase.fallback == "on-demand":
        dearer = fleet_cost(outcome, replace(rates, spot_usd_per_hour=column(on_demand_usd)))
        cost = replace(cost, p95=np.maximum(cost.p95, dearer.p95), reserve=np.maximum(cost.reserve, dearer.reserve))
    return cost


def _with_unit_prices(plan: FleetPlan, catalog: Catalog) -> Catalog:
    """The catalog with the plan's unit prices in its region."""
    prices = {(price.item, price.region): price for price in catalog.unit_prices}
    for price in plan.prices:
        for item in UNIT_ITEMS:
            if price.item == f"{item} {plan.region}":
                prices[item, plan.region] = UnitPrice(
                    item=item, region=plan.region, usd=price.usd, source=price.source, as_of=price.as_of
                )
    return replace(catalog, unit_prices=tuple(prices.values()))


def _carry_usd(plan: FleetPlan) -> float:
    """USD of one copy of the data out of another region, at the plan's price."""
    staging = plan.staging
    if staging is None or staging.data_region is None:
        return 0.0
    item = transfer_price(staging.data_region, plan.region).item
    stated = next((price.usd for price in plan.prices if price.item == item), None)
    return transfer_usd(staging.data_gib, staging.data_region, plan.region, stated)


def _check_staging_dollars(plan: FleetPlan, catalog: Catalog, outcome: Outcome) -> Iterator[Fault]:
    staging, copy = plan.staging, _node_copy(plan)
    if staging is None or copy is None:
        return
    prices = _with_unit_prices(plan, catalog)
    per_month = prices.unit_price("s3-standard-storage", plan.region).usd
    request = prices.unit_price("s3-read-request", plan.region).usd
    copies = plan.node_count + float(outcome.new_nodes[0])
    stored = per_month * staging.data_gib * plan.hours.expected / HOURS_PER_MONTH
    compute = plan.cost_usd.breakdown.compute * staging.hours / plan.hours.expected
    for field, value, expected in (
        ("storage_usd", staging.storage_usd, stored + copy.requests * request * copies),
        ("transfer_usd", staging.transfer_usd, _carry_usd(plan) * copies),
        ("compute_usd", staging.compute_usd, compute),
    ):
        if _differs(value, expected, CENTS):
            yield _unequal(f"staging.{field}", value, expected, "staging's data and hours at the plan's prices")


def _check_lustre_dollars(plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    if plan.lustre is None:
        return
    per_month = _with_unit_prices(plan, catalog).unit_price("lustre-storage", plan.region).usd
    expected = per_month * plan.lustre.storage_gib * plan.hours.expected / HOURS_PER_MONTH
    if _differs(plan.lustre.usd, expected, CENTS):
        yield _unequal("lustre.usd", plan.lustre.usd, expected, "lustre.storage_gib over hours.expected")


def _check_dollars(
    plan: FleetPlan, cost: FleetCost, outcome: Outcome, node_usd: float, on_demand_usd: float
) -> Iterator[Fault]:
    stated, nodes = plan.cost_usd, f"{counted(plan.node_count, 'node')} x hours.expected {plan.hours.expected:g}"
    dearer = plan.purchase.on_demand_nodes
    base = f", {dearer} of them at {on_demand_usd:g}" if dearer else ""
    reasons = {
        "compute": f"{nodes} at {node_usd:g} USD an hour{base}",
        "volumes": f"{nodes} with volumes of {plan.volumes.root_gib} GiB at the plan's prices",
        "storage": f"{counted(plan.job.checkpoints_kept, 'checkpoint')} of {plan.job.checkpoint_gib:g} GiB, and "
        "staging's data with its requests, or lustre's with its file system, at the plan's prices",
        "transfer": f"interface endpoints for hours.expected {plan.hours.expected:g} and copies of the data from "
        "staging.data_region, at the plan's prices",
        "head_node": f"the controller for hours.expected {plan.hours.expected:g} at the plan's prices",
    }
    for part, why in reasons.items():
        value, expected = getattr(stated.breakdown, part), float(getattr(cost, part)[0])
        if _differs(value, expected, CENTS):
            yield _unequal(f"cost_usd.breakdown.{part}", value, expected, why)
    for field, value, expected in (
        ("expected", stated.expected, stated.breakdown.total()),
        ("p50", stated.p50, float(cost.p50[0])),
    ):
        if _differs(value, expected, CENTS):
            yield _unequal(f"cost_usd.{field}", value, expected, "cost_usd.breakdown and the spread of the hours")
    p95 = float(cost.p95[0])
    spot = {node: usd for node, usd in plan.node_prices_usd_per_hour.items() if node.market == "spot"}
    if plan.purchase.spot_types and spot:
        dearest = max(spot.values()) / node_usd - 1
        p95 += max(0.0, dearest) * float(cost.compute[0] * outcome.hours_p95[0] / outcome.hours_expected[0])
    if stated.p95 < p95 * (1 - DIGITS) - CENTS:  # a higher one only keeps limits more strictly
        yield Fault(
            field="cost_usd.p95",
            value=f"{stated.p95:.2f}",
            limit=f"{p95:.2f} at least",
            why=f"the nodes' prices and hours.p95 {plan.hours.p95:g}",
            next_step=AGAIN,
        )


def _check_limits(plan: FleetPlan, cost: FleetCost) -> Iterator[Fault]:
    job, reserve = plan.job, float(cost.reserve[0])
    needed = plan.cost_usd.p95 + reserve
    if job.budget_usd is not None and needed > job.budget_usd * (1 + DIGITS) + CENTS:
        yield Fault(
            field="job.budget_usd",
            value=f"{job.budget_usd:.2f}",
            limit=f"{needed:.2f} at least",
            why=f"the run costs {plan.cost_usd.p95:.2f} at the 95th percentile, and {reserve:.2f} are kept to save and "
            "end; at the budget the controller ends the fleet before the run is done",
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
