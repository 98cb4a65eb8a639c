"""From candidates to FleetPlans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.catalog import Catalog
from optimizer.catalog.region_transfer import transfer_price
from optimizer.catalog.ttl import age_days, spot_limit_days
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer
from optimizer.contract.plan import (
    Cost,
    CostBreakdown,
    FleetPlan,
    Interruption,
    Market,
    Memory,
    NodeItem,
    NodeSpec,
    Parallelism,
    PlannedJob,
    PlannedLustre,
    PlanPrice,
    Purchase,
    SpeedSource,
    SpotRange,
    Spread,
    Staging,
)
from optimizer.contract.request import Workload
from optimizer.contract.units import HOURS_PER_MONTH, cents, rounded
from optimizer.economics.interruption import FAILURE_SOURCE
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
    fastest, purchase, nodes = candidate.table.fastest, candidate.purchase, candidate.nodes
    owned, region, work = purchase.reservation, purchase.offer.region, problem.request.workload
    run, parallelism = describe_run(problem, candidate), fastest.parallelism(candidate.configuration)
    return FleetPlan(
        instance_type=fastest.instance.name,
        region=region,
        zone_ids=purchase.offer.zone_ids,
        node_count=nodes,
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
        step_breakdown_s={part: rounded(s[i]) for part, s in estimates.time_s.items() if s[i] > 0},
        mfu=rounded(estimates.mfu[i]),
        **run,
        prices=(*list_node_prices(purchase), *list_unit_prices(region, problem.catalog, work)),
        spot_range=_describe_range(candidate, run["cost_usd"].expected),
        **describe_speed(problem, fastest.instance, nodes, parallelism, estimates, i),
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
    """Hours, dollars, interruptions, copies and file system of the data of a candidate's run, as fields of a plan."""
    (table, row), hazard, nodes = candidate, candidate.purchase.hazard, candidate.nodes
    usd, work = problem.running_costs(candidate.purchase.offer.region), problem.request.workload
    copy = problem.node_copy(table.fastest.instance.name)
    outcome, saves, cost = table.outcome, table.checkpoints, table.cost
    hours, staging_hours = float(outcome.hours_expected[row]), float(outcome.staging_hours[row])
    # The parts add up to the cent.
    breakdown = CostBreakdown(**{part: cents(getattr(cost, part)[row]) for part in CostBreakdown.model_fields})
    expected = cents(breakdown.total())
    fields: dict[str, Any] = {
        "hours": Spread(**{name: rounded(getattr(outcome, f"hours_{name}")[row]) for name in Spread.model_fields}),
        "cost_usd": Cost(
            expected=expected,
            p50=min(cents(cost.p50[row]), expected),
            p95=max(cents(cost.p95[row]), expected),
            breakdown=breakdown,
        ),
        "interruption": Interruption(
            rate=rounded(float(outcome.rate[row]) / nodes),
            source=f"{hazard.source}; {FAILURE_SOURCE}" if hazard else FAILURE_SOURCE,
            wait_hours=rounded(hazard.wait_hours) if hazard else None,
            expected_count=rounded(outcome.expected_count[row]),
            checkpoint_interval_s=rounded(outcome.checkpoint_interval_s[row]),
            checkpoint_stall_s=rounded(saves.stall_s[row]),
            checkpoint_save_s=rounded(saves.save_s[row]),
            checkpoint_usd=rounded(saves.usd[row]),
            lost_hours=rounded(outcome.lost_hours[row]),
        ),
    }
    if copy:
        copies = nodes + float(outcome.new_nodes[row])
        stored_usd = usd.data_usd_per_month / HOURS_PER_MONTH * hours
        fields["staging"] = Staging(
            data_gib=copy.data_gib,
            files=copy.files,
            node_hours=rounded(copy.hours),
            gib_per_s=rounded(copy.gib_per_s),
            bound=copy.bound,
            source=copy.source,
            hours=rounded(staging_hours),
            compute_usd=cents(float(cost.compute[row]) * staging_hours / hours),
            storage_usd=cents(stored_usd + copy.requests * usd.read_request_usd * copies),
            data_region=usd.data_region,
            transfer_usd=cents(usd.carry_usd * copies),
        )
    if work.lustre_gib is not None and work.data_gib is not None:
        lustre_usd = cents(usd.lustre_usd_per_month * hours / HOURS_PER_MONTH)
        fields["lustre"] = PlannedLustre(storage_gib=work.lustre_gib, data_gib=work.data_gib, usd=lustre_usd)
    return fields


def describe_node(instance: InstanceType) -> NodeSpec:
    """The facts of a type that a plan has."""
    names = NodeSpec.model_fields.keys() - {"gpu"}
    return NodeSpec.model_validate({name: getattr(instance, name) for name in names} | {"gpu": instance.gpu.name})


def describe_speed(
    problem: Problem, instance: InstanceType, nodes: int, parallelism: Parallelism, estimates: Estimates, i: int
) -> dict[str, Any]:
    """Memory and speed of the ``i``-th estimate, of ``nodes`` nodes of a type, as fields of a plan."""
    hardware, splits = Hardware.from_instance_type(instance), parallelism.beyond_data
    residual, source = speed_source(problem.calibration, problem.model, problem.recipe, hardware, nodes, splits)
    return {
        "node": describe_node(instance),
        "memory": Memory(
            peak_gib=rounded(estimates.peak_memory_gib[i]),
            p95_gib=rounded(estimates.p95_memory_gib[i]),
            limit_gib=rounded(estimates.limit_gib[i]),
            breakdown={part: rounded(gib[i]) for part, gib in estimates.memory_gib.items()},
        ),
        "step_time_s": rounded(estimates.step_time_s[i]),
        "tokens_per_second": rounded(estimates.tokens_per_second[i]),
        "calibration": SpeedSource(source=source, relative_error=rounded(residual.relative_error), rows=residual.rows),
    }


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
