"""Nodes, zones and prices of a plan against the catalog, and its model against the architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from optimizer.catalog import Catalog, region_transfer
from optimizer.catalog.model import UNIT_ITEMS
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.hardware import Offer
from optimizer.contract.plan import QUOTE, FleetPlan, Market, NodeItem, PlanPrice, Tuning
from optimizer.contract.units import rounded
from optimizer.economics.checkpoint import checkpoint_gib
from optimizer.performance.fine_tuning import trained_parameters
from optimizer.search.plan_builder import can_stand_in, describe_node
from optimizer.workload.resolve import resolve_model

AGAIN = "make the plan anew with `gpufleet recommend`, with what you want to change in its request"
# Change of a price since the plan was made that needs no new plan: the estimate's own error is larger.
PRICE_CHANGE = 0.05

# The request has the price of an owned reservation, and a Capacity Block's is in its offering: the catalog has neither.
_PRIVATE: tuple[Market, ...] = ("owned-reservation", "capacity-block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One field of a plan with its value, the limit that it breaks, why there is one, and the next step."""

    field: str
    value: str
    limit: str
    why: str
    next_step: str = AGAIN

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, limit {self.limit}: {self.why}"


def check_facts(plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    """Compare nodes, zones, further spot types and prices of ``plan`` with ``catalog``."""
    try:
        instance = catalog.instance_type(plan.instance_type)
        offer = catalog.offer(plan.instance_type, plan.region)
    except InvalidInputError as error:
        yield Fault(
            field="instance_type and region",
            value=f"{plan.instance_type} in {plan.region}",
            limit="what the catalog knows",
            why=error.got,
            next_step=error.next_step,
        )
        return
    node = describe_node(instance)
    for field in type(node).model_fields:
        value, fact = getattr(plan.node, field), getattr(node, field)
        # Null: a plan of an earlier version.
        if value not in (fact, None):
            yield Fault(
                field=f"node.{field}",
                value=str(value),
                limit=str(fact),
                why=f"{plan.instance_type} has it ({instance.source}, {instance.as_of})",
            )
    yield from _check_places(plan, catalog, offer)
    yield from _check_model(plan)
    for i, price in enumerate(plan.prices):
        yield from _check_price(f"prices.{i}.usd", price, plan, catalog)


def _check_model(plan: FleetPlan) -> Iterator[Fault]:
    job = plan.job
    # Without a description only the count is known, which is all that training of the whole model needs.
    trained = job.parameters if job.tuning == Tuning() else None
    if "model_type" in (job.architecture or {}):
        try:
            model = resolve_model(job.architecture or {})
        except GpufleetError as error:
            described, why = 0, error.got
        else:
            described, why = model.parameters, f"job.architecture describes {model.parameters:,} parameters"
            trained = trained_parameters(model, job.tuning.facts)
        if job.parameters != described:
            value = f"{job.parameters:,}"
            yield Fault(field="job.parameters", value=value, limit="its model's", why=why)
    if trained is None:
        return
    size_gib = rounded(checkpoint_gib(trained, job.optimizer, pure=job.precision == "pure-bf16"))
    if not math.isclose(job.checkpoint_gib, size_gib, rel_tol=1e-5):
        yield Fault(
            field="job.checkpoint_gib",
            value=f"{job.checkpoint_gib:g}",
            limit=f"{size_gib:g}",
            why=f"{trained:,} trained parameters and {job.optimizer}'s state have it",
        )


def _check_places(plan: FleetPlan, catalog: Catalog, offer: Offer | None) -> Iterator[Fault]:
    strangers = sorted(set(plan.zone_ids) - set(offer.zone_ids)) if offer and offer.zone_ids else []
    if offer and strangers:
        yield Fault(
            field="zone_ids",
            value=", ".join(plan.zone_ids),
            limit=f"among {', '.join(offer.zone_ids)}",
            why=f"{', '.join(strangers)} does not offer {plan.instance_type}",
        )
    known = {instance.name: instance for instance in catalog.instance_types}
    own = known[plan.instance_type]
    for name in plan.purchase.spot_types:
        if name not in known or not can_stand_in(own, known[name]):
            yield Fault(
                field="purchase.spot_types",
                value=name,
                limit=f"types with the GPUs and network of {plan.instance_type}, and nothing smaller",
                why="the layout, memory and hours are of one kind of node",
            )


def _check_price(field: str, price: PlanPrice, plan: FleetPlan, catalog: Catalog) -> Iterator[Fault]:
    """Compare a price with the catalog's; a later one than the catalog's, or a quote, is the plan's own."""
    if price.source.startswith(QUOTE) or (price.node and price.node.market in _PRIVATE):
        return
    if price.node:
        known = _node_prices(price.node, plan.purchase.zone_id or "", catalog)
    else:
        known = _unit_prices(price.item, plan.region, catalog)
    if not known:
        if price.as_of <= catalog.made_at.date():
            yield Fault(
                field=field,
                value=f"{price.usd:g} for {price.item}",
                limit="a price that the catalog has, or a later one",
                why=f"the catalog of {catalog.made_at:%Y-%m-%d} has none for it",
                next_step=f"gpufleet catalog refresh --region {plan.region}, then {AGAIN}",
            )
        return
    usd, as_of = min(known, key=lambda pair: abs(pair[0] - price.usd))
    older = price.as_of < as_of
    if price.as_of <= as_of and not math.isclose(price.usd, usd, rel_tol=PRICE_CHANGE if older else 1e-9):
        yield Fault(
            field=field,
            value=f"{price.usd:g} ({price.item}, {price.as_of})",
            limit=f"{usd:g}, within {PRICE_CHANGE:.0%}" if older else f"{usd:g}",
            why=f"the catalog's price of {as_of}",
            next_step=f"{AGAIN}; one that you negotiated goes into constraints.quotes (docs/request.md)",
        )


def _node_prices(node: NodeItem, zone_id: str, catalog: Catalog) -> list[tuple[float, date]]:
    """USD an hour and date of the catalog's prices of a node; of spot in no known zone, one a zone."""
    try:
        offer = catalog.offer(node.instance_type, node.region)
    except InvalidInputError:
        return []
    if offer is None:
        return []
    spot = offer.spot_in(zone_id)
    by_market = {
        "on-demand": (offer.on_demand,),
        "reserved-1yr": (offer.reserved_1yr,),
        "spot": (spot,) if spot else offer.spot_by_zone,
    }
    return [(price.usd_per_hour, price.as_of) for price in by_market.get(node.market, ()) if price]


def _unit_prices(name: str, region: str, catalog: Catalog) -> list[tuple[float, date]]:
    item, _, place = name.partition(" ")
    if item == region_transfer.ITEM and place.count(" ") == 1:
        price = region_transfer.transfer_price(*place.split())
        return [(price.usd_per_gb, price.as_of)]
    prices = [catalog.unit_price(item, region) for item in UNIT_ITEMS if name == f"{item} {region}"]
    return [(price.usd, price.as_of) for price in prices]
