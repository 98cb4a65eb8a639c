"""Purchases: the ways to pay for nodes of one type in one region."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from optimizer.economics.interruption import Hazard, spot_hazard
from optimizer.hardware import InstanceType, Offer, Price
from optimizer.plan import PurchaseOption
from optimizer.request import Constraints, Reservation
from optimizer.search.problem import Problem
from optimizer.search.rejections import Rejection, rejection


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """One way to pay for the nodes of one type in one region.

    Attributes:
        option: the purchase option.
        offer: type and region.
        price: of a node that is not on the on-demand base.
        base: nodes bought on demand first; only with spot.
        hazard: of a spot node; None for other options.
        reservation: capacity the user owns; None where none is used.
        fallback: whether on-demand nodes replace spot nodes that do not come.
        hours: longest the nodes can be had, their end included; that of a Capacity Block ends.
    """

    option: PurchaseOption
    offer: Offer
    price: Price
    base: int = 0
    hazard: Hazard | None = None
    reservation: Reservation | None = None
    fallback: bool = False
    hours: float = math.inf

    @property
    def committed(self) -> bool:
        """Whether this buys a new one-year commitment."""
        return self.option == "reserved" and self.reservation is None


def purchases(offer: Offer, constraints: Constraints) -> list[Purchase]:
    """Every way to pay for one offer that the constraints allow and the catalog has a price for."""
    found = []
    options = constraints.purchase_options
    if "on-demand" in options and offer.on_demand:
        found.append(Purchase(option="on-demand", offer=offer, price=offer.on_demand))
    if "spot" in options and offer.spot:
        hazard = spot_hazard(
            offer.interruption_band, multi_gpu=offer.instance.gpu_count > 1, as_of=offer.spot.as_of.isoformat()
        )
        fallback = constraints.spot_fallback == "on-demand"
        if offer.on_demand or not fallback:
            found.append(Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard, fallback=fallback))
        if offer.on_demand:  # one node that is never reclaimed keeps the rendezvous and the newest checkpoint at hand
            found.append(
                Purchase(option="spot", offer=offer, price=offer.spot, hazard=hazard, fallback=fallback, base=1)
            )
    if "reserved" in options and offer.reserved_1yr:
        found.append(Purchase(option="reserved", offer=offer, price=offer.reserved_1yr))
    for owned in constraints.usable_reservations:
        if (owned.instance_type, owned.region) == (offer.instance.name, offer.region):
            as_of = offer.on_demand.as_of if offer.on_demand else offer.instance.as_of
            price = Price(
                usd_per_hour=owned.usd_per_hour or 0.0, source="the request: an existing reservation", as_of=as_of
            )
            block = owned.capacity_block
            hours = block.usable_hours(datetime.now(UTC)) if block else math.inf
            found.append(Purchase(option=owned.option, offer=offer, price=price, reservation=owned, hours=hours))
    return found


def ways_to_pay(instance: InstanceType, problem: Problem) -> list[Purchase] | Rejection:
    """Every way to pay for one type in the problem's regions, or why there is none."""
    limits, regions = problem.request.constraints, problem.regions
    offers = [offer for region in regions if (offer := problem.catalog.offer(instance.name, region)) is not None]
    ways = [way for offer in offers for way in purchases(offer, limits)]
    # Capacity that is owned is there, whether the catalog knows of an offer or not.
    offered = {offer.region for offer in offers}
    for region in {owned.region for owned in limits.existing_reservations} & set(regions) - offered:
        unpriced = Offer(
            instance=instance,
            region=region,
            zone_ids=(),
            on_demand=None,
            reserved_1yr=None,
            spot=None,
            interruption_band=None,
        )
        ways += purchases(unpriced, limits)
    if ways:
        return ways
    if not offers:
        wanted = ", ".join(limits.regions) or "any region"
        return rejection(instance.name, "region", f"not offered in {wanted}", wanted, None)
    asked = ", ".join(limits.purchase_options)
    return rejection(
        instance.name,
        "price",
        f"the catalog has no {asked} price of it in {', '.join(offer.region for offer in offers[:3])}"
        + (" ..." if len(offers) > 3 else ""),
        asked,
        None,
    )
