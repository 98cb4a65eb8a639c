"""The controller's settings, from the plan and the stack's settings: names, limits and the prices of its meter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from bootstrap.contract.settings import ControllerSettings, OpeningHours
from infra.naming import Names
from infra.places import DeclaredPlace, node_prices
from infra.settings import StackSettings
from optimizer.contract.plan import INTERFACE_ENDPOINTS, FleetPlan

# NAT gateway, metered as long as the stack exists: itself 0.093, its address 0.005; the dearest region of the catalog
# (optimizer/catalog/data/inputs/unit_prices.csv, 2026-11-21: 0.045 to 0.093). Its GB are not counted.
NAT_USD_PER_HOUR = 0.093 + 0.005
# Interface endpoint beyond those of the plan's cost (ECR), metered likewise: the dearest region of the catalog
# (the same file, 0.010 to 0.014).
ENDPOINT_USD_PER_HOUR = 0.014


def job_id(plan: FleetPlan) -> str:
    """12 hex digits that name the job: another layout, code or budget goes on with the same meter."""
    job = plan.job.model_dump(mode="json", exclude={"budget_usd", "deadline_hours"})
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:12]


def control_settings(
    settings: StackSettings,
    names: Names,
    *,
    bucket: str,
    queue_url: str,
    group: str,
    train_archive: str,
    places: Mapping[str, DeclaredPlace],
    subnets: Mapping[str, str],
) -> ControllerSettings:
    """Build the controller's settings; errors as ``places.node_prices``."""
    prices = node_prices(settings.plan)
    for place in places.values():
        # Two zones may differ in price: nodes without a market price are metered at the dearer one.
        if place.number > 1 and not place.block:
            by_type, instance_type = prices.setdefault(place.purchase, {}), place.instance_type
            by_type[instance_type] = max(place.usd_per_hour, by_type.get(instance_type, 0.0))
    found = {name: place.for_controller(subnets) for name, place in places.items()}
    hours = {name: OpeningHours(start=it.start, end=it.end) for name, place in places.items() if (it := place.block)}
    plan, purchase = settings.plan, settings.plan.purchase
    # The owner of an existing reservation pays for it, used or not.
    makes_reservation = purchase.option == "reserved" and not purchase.capacity_reservation_id
    return ControllerSettings(
        schema_version=1,
        stack=names.stack,
        region=names.region,
        group=group,
        launch_hook=names.launch_hook,
        terminate_hook=names.terminate_hook,
        bucket=bucket,
        control_prefix=names.control_prefix,
        queue_url=queue_url,
        metric_namespace=names.metric_namespace,
        mode=settings.mode,
        run_id=settings.run_id(train_archive),
        job=job_id(plan),
        node_count=plan.node_count,
        min_nodes=settings.min_nodes,
        prices=prices,
        volume_usd_per_node_hour=_rate(plan.cost_usd.breakdown.volumes, plan.hours.expected * plan.node_count),
        fixed_usd_per_hour=fixed_usd_per_hour(plan, nat=settings.nat, endpoints=len(settings.own_endpoints)),
        reserved_nodes=plan.node_count if makes_reservation else 0,
        ceiling_usd=settings.ceiling_usd,
        gang_window_s=60 * settings.gang_window_minutes + settings.staging_limit_s,
        drain_s=plan.terminate_timeout_s,
        deadline_hours=plan.job.deadline_hours,
        places=found,
        opening_hours=hours,
        is_reserved=purchase.option == "reserved" and not purchase.on_demand_top_up,
        spot_policy=settings.spot_policy,
        steps=plan.job.steps,
        checkpoint_interval_s=plan.interruption.most_lost_s,
        waits=settings.waits,
        shared=settings.shared,
        zones={subnet: zone_id for zone_id, subnet in subnets.items()},
    )


def fixed_usd_per_hour(plan: FleetPlan, *, nat: bool, endpoints: int) -> float:
    """Return what the stack costs without a node, USD an hour; ``endpoints``: those of its own VPC."""
    cost = plan.cost_usd.breakdown
    stack = _rate(cost.storage + cost.transfer + cost.head_node, plan.hours.expected)
    beyond = max(0, endpoints - len(INTERFACE_ENDPOINTS)) * ENDPOINT_USD_PER_HOUR
    return stack + beyond + (NAT_USD_PER_HOUR if nat else 0.0)


def _rate(usd: float, hours: float) -> float:
    # Nine digits of dollars per hour: less than anybody can be billed.
    return round(usd / hours, 9)
