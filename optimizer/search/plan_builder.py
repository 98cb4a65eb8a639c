"""From candidates to FleetPlans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.catalog import Catalog
from optimizer.catalog.region_transfer import transfer_price
from optimizer.catalog.ttl import age_days, spot_limit_days
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer
from optimizer.contract.plan import (
    FleetPlan,
    Market,
    Memory,
    NodeItem,
    NodeSpec,
    Parallelism,
    PlannedJob,
    PlanPrice,
    Purchase,
    SpeedSource,
    SpotRange,
)
from optimizer.contract.request import Workload
from optimizer.contract.units import rounded
from optimizer.economics import planned
from optimizer.economics.running_costs import CONTROLLER_ITEMS
from optimizer.performance.confidence import speed_source
from optimizer.performance.expected import expected_rates
from optimizer.performance.types import Estimates, Hardware
from optimizer.search.candidates import Candidate
from optimizer.search.fastest import estimate_configurations
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase


def build_plans(problem: Problem, candidates: Sequence[Candidate]) -> list[FleetPlan]:
    """Build the plans of candidates."""
    if not candidates:
        return []
    chosen = [(candidate.table.fastest, candidate.configuration) for candidate in candidates]
    estimates, job = estimate_configurations(problem, chosen), _describe_job(problem)
    return [_build(problem, candidate, estimates, i, job) for i, candidate in enumerate(candidates)]


def _build(problem: Problem, candidate: Candidate, estimates: Estimates, i: int, job: PlannedJob) -> FleetPlan:
    table, row = candidate
    fastest, purchase, nodes = table.fastest, candidate.purchase, candidate.nodes
    owned, region, work = purchase.reservation, purchase.offer.region, problem.request.workload
    run, parallelism = describe_run(problem, candidate), fastest.parallelism(candidate.configuration)
    lustre = None
    if work.lustre_gib is not None and work.data_gib is not None:
        hours = float(table.outcome.hours_expected[row])
        lustre = planned.describe_lustre(problem.running_costs(region), work.lustre_gib, work.data_gib, hours)
    return FleetPlan(
        instance_type=fastest.instance.name,
        region=region,
        zone_ids=purchase.offer.zone_ids,
        node_count=nodes,
        node=describe_node(fastest.instance),
        purchase=Purchase(
            option=purchase.option,
            on_demand_base=purchase.base,
            on_demand_top_up=nodes - owned.count if owned and purchase.topped_up else 0,
            fallback="on-demand" if purchase.fallback else "none",
            capacity_reservation_id=owned.capacity_reservation_id if owned else None,
            capacity_block=owned.capacity_block if owned else None,
            next_blocks=purchase.next_blocks,
            zone_id=purchase.price.zone_id or None,
        ),
        job=job,
        parallelism=parallelism,
        memory=describe_memory(estimates, i),
        step_time_s=rounded(estimates.step_time_s[i]),
        step_breakdown_s={part: rounded(s[i]) for part, s in estimates.time_s.items() if s[i] > 0},
        tokens_per_second=rounded(estimates.tokens_per_second[i]),
        mfu=rounded(estimates.mfu[i]),
        **run,
        prices=(*list_node_prices(purchase), *list_unit_prices(region, problem.catalog, work)),
        lustre=lustre,
        spot_range=_describe_range(candidate, run["cost_usd"].expected),
        calibration=describe_speed(problem, fastest.instance, nodes, parallelism),
        expected=expected_rates(Hardware.from_instance_type(fastest.instance), nodes, problem.calibration),
    )


def _describe_job(problem: Problem) -> PlannedJob:
    request, model, recipe, amount = problem.request, problem.model, problem.recipe, problem.amount
    return PlannedJob(
        model=model.name,
        parameters=model.parameters,
        samples=amount.samples,
        tokens=amount.samples * recipe.seq_len,
        seq_len=recipe.seq_len,
        target_len=recipe.target_len or None,
        global_batch=amount.global_batch,
        steps=amount.steps,
        precision=request.workload.precision,
        optimizer=request.workload.optimizer,
        compiled=request.workload.compiled,
        tuning=recipe.tuning,
        framework=recipe.framework,
        architecture=model.build_config,
        model_revision=model.revision or None,
        checkpoint_gib=rounded(problem.checkpoint_gib),
        budget_usd=request.constraints.budget_usd,
        deadline_hours=request.constraints.deadline_hours,
    )


def describe_memory(estimates: Estimates, i: int) -> Memory:
    """Memory of the ``i``-th estimate."""
    return Memory(
        peak_gib=rounded(estimates.peak_memory_gib[i]),
        p95_gib=rounded(estimates.p95_memory_gib[i]),
        limit_gib=rounded(estimates.limit_gib[i]),
        breakdown={part: rounded(gib[i]) for part, gib in estimates.memory_gib.items()},
    )


def _describe_range(candidate: Candidate, expected_usd: float) -> SpotRange | None:
    purchase, outcome, row = candidate.purchase, candidate.table.outcome, candidate.row
    if not purchase.stale:
        return None
    prices = purchase.offer.spot_by_zone
    dearer_usd = prices[-1].usd_per_hour - purchase.price.usd_per_hour
    nodes = candidate.nodes - purchase.base
    # The nodes wait one less while a reclaimed one is away, as in fleet_cost.
    node_hours = nodes * float(outcome.running_hours[row]) + (nodes - 1) * float(outcome.waiting_hours[row])
    return SpotRange(
        age_days=age_days(purchase.price.as_of),
        limit_days=spot_limit_days(purchase.price.source),
        zones=sum(bool(price.zone_id) for price in prices),
        cost_usd_dearest=round(expected_usd + dearer_usd * node_hours, 2),
    )


def describe_run(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """Hours, dollars, interruptions and copies of the data of a candidate's run, as fields of a plan."""
    (table, row), purchase, nodes = candidate, candidate.purchase, candidate.nodes
    outcome, copy = table.outcome, problem.node_copy(table.fastest.instance.name)
    usd = problem.running_costs(purchase.offer.region)
    return {
        "hours": planned.describe_hours(outcome, row),
        "cost_usd": planned.describe_cost(table.cost, row),
        "interruption": planned.describe_interruption(
            outcome, table.checkpoints, row, nodes=nodes, hazard=purchase.hazard
        ),
        "staging": planned.describe_staging(copy, usd, outcome, table.cost, row, nodes=nodes) if copy else None,
    }


def describe_node(instance: InstanceType) -> NodeSpec:
    """The facts of a type that a plan has."""
    names = NodeSpec.model_fields.keys() - {"gpu"}
    return NodeSpec.model_validate({name: getattr(instance, name) for name in names} | {"gpu": instance.gpu.name})


def describe_speed(problem: Problem, instance: InstanceType, nodes: int, parallelism: Parallelism) -> SpeedSource:
    """Source and error of the speed of a layout on ``nodes`` nodes of a type."""
    hardware, splits = Hardware.from_instance_type(instance), parallelism.beyond_data
    residual, source = speed_source(problem.calibration, problem.model, problem.recipe, hardware, nodes, splits)
    return SpeedSource(source=source, relative_error=rounded(residual.relative_error), rows=residual.rows)


def list_node_prices(purchase: PricedPurchase) -> list[PlanPrice]:
    """Prices of the nodes that a purchase may buy."""
    offer, option = purchase.offer, purchase.option
    market: Market = option if option != "reserved" else "owned-reservation" if purchase.reservation else "reserved-1yr"
    prices = [node_price(market, offer, purchase.price)]
    if (purchase.base or purchase.fallback or purchase.topped_up) and offer.on_demand:
        # `recommend` shows the source of the first price: of a top-up the market's, not the owner's.
        prices.insert(0 if purchase.topped_up else 1, node_price("on-demand", offer, offer.on_demand))
    return prices


def node_price(market: Market, offer: Offer, price: HourlyPrice) -> PlanPrice:
    """The price of a node, as a plan has it."""
    item = str(NodeItem(market, offer.instance.name, offer.region))
    return PlanPrice(item=item, usd=price.usd_per_hour, per="hour", source=price.source, as_of=price.as_of)


def list_unit_prices(region: str, catalog: Catalog, work: Workload) -> list[PlanPrice]:
    """Unit prices that a fleet pays in a region."""
    # The volume of a plan has gp3's included IOPS, and more than its included throughput.
    items = ["gp3-storage", "gp3-throughput", "s3-standard-storage", "s3-write-request"]
    items += ["kms-key", "vpc-endpoint", *CONTROLLER_ITEMS]
    if work.lustre_gib is not None:
        items.append("lustre-storage")
    elif work.data_gib is not None:
        items.append("s3-read-request")
    prices = (catalog.unit_price(item, region) for item in items)
    listed = [
        PlanPrice(item=f"{price.item} {region}", usd=price.usd, per=price.per, source=price.source, as_of=price.as_of)
        for price in prices
    ]
    if work.data_region not in (None, region):
        carry = transfer_price(work.data_region, region)
        listed.append(PlanPrice(item=carry.item, usd=carry.usd, per="GB", source=carry.source, as_of=carry.as_of))
    return listed
