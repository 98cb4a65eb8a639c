"""Audit of a plan before money is spent on it: it is as ``recommend`` wrote it, and its nodes' prices still hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

from optimizer.catalog import Catalog
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import HourlyPrice
from optimizer.contract.plan import QUOTE, FleetPlan, PlanPrice

AGAIN = "make the plan anew with `gpufleet recommend`, with what you want to change in its request"
# Change of a price since the plan was made that needs no new plan: the estimate's own error is larger.
PRICE_CHANGE = 0.05


def check_plan(plan: FleetPlan, catalog: Catalog) -> None:
    """Raise the first fault of a plan."""
    for fault in audit(plan, catalog):
        raise fault


def audit(plan: FleetPlan, catalog: Catalog) -> Iterator[InvalidInputError]:
    """Yield what keeps a plan from being deployed; reading it has refused a digest that is not its fields'."""
    for i, price in enumerate(plan.prices):
        yield from _check_price(f"prices.{i}.usd", price, plan.purchase.zone_id or "", catalog)
    for i, alternate in enumerate(plan.alternates):
        yield from _check_price(f"alternates.{i}.price.usd", alternate.price, alternate.zone_id, catalog)


def _check_price(field: str, price: PlanPrice, zone_id: str, catalog: Catalog) -> Iterator[InvalidInputError]:
    """Compare the price of a node with later ones of the catalog; a quote is the plan's own."""
    later = [known for known in _known_prices(price, zone_id, catalog) if known.as_of > price.as_of]
    if not later or price.source.startswith(QUOTE):
        return
    nearest = min(later, key=lambda known: abs(known.usd_per_hour - price.usd))
    if not math.isclose(price.usd, nearest.usd_per_hour, rel_tol=PRICE_CHANGE):
        yield InvalidInputError(
            f"{field} is {price.usd:g} ({price.item}, {price.as_of})",
            limit=f"{nearest.usd_per_hour:g}, within {PRICE_CHANGE:.0%}",
            why=f"the catalog's price of {nearest.as_of}",
            next_step=f"{AGAIN}; one that you negotiated goes into constraints.quotes (docs/request.md)",
        )


def _known_prices(price: PlanPrice, zone_id: str, catalog: Catalog) -> list[HourlyPrice]:
    """Return the catalog's prices of a node; of spot in no known zone, one a zone."""
    node = price.node
    try:
        offer = node and catalog.offer(node.instance_type, node.region)
    except InvalidInputError:  # the catalog has no such type or region
        return []
    if node is None or offer is None:
        return []
    spot = offer.spot_in(zone_id)
    by_market = {
        "on-demand": (offer.on_demand,),
        "reserved-1yr": (offer.reserved_1yr,),
        "spot": (spot,) if spot else offer.spot_by_zone,
    }
    # The request has the price of an owned reservation, and a Capacity Block's is in its offering.
    return [known for known in by_market.get(node.market, ()) if known]
