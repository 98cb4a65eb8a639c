"""Purchases of the nodes of one type in one region, with price and hazard."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property

from optimizer.catalog.ttl import age_days, is_stale_spot
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer
from optimizer.contract.plan import MOST_BLOCKS, NextBlock, PurchaseOption, Volumes, block_gaps, usable_hours
from optimizer.contract.request import Constraints, ExistingReservation
from optimizer.economics import price_age
from optimizer.economics.interruption import Hazard, learn_hazard, spot_hazard
from optimizer.economics.staging import disk_gib
from optimizer.search.problem import Problem, Rejection


@dataclass(frozen=True, kw_only=True)
class PricedPurchase:
    """A purchase with the numbers that its cost follows from.

    Attributes:
        price: of a node above the on-demand base.
        base: nodes bought on demand first; only with spot.
        topped_up: all of the reservation's nodes, and others on demand.
        hazard: of a spot node.
        fallback: on-demand nodes replace spot nodes that do not come, and Capacity Blocks that are over.
        hours: hours until the last Capacity Block ends, drain and gaps included; infinite for others.
        gaps: of a row of blocks, hours after which each closes, and hours until the next one trains.
        following: Capacity Blocks that follow the reservation's.
    """

    option: PurchaseOption
    offer: Offer
    price: HourlyPrice
    base: int = 0
    topped_up: bool = False
    hazard: Hazard | None = None
    reservation: ExistingReservation | None = None
    fallback: bool = False
    hours: float = math.inf
    gaps: Sequence[tuple[float, float]] = ()
    following: tuple[ExistingReservation, ...] = ()

    @cached_property
    def stale(self) -> bool:
        """True for a spot price that is older than its limit."""
        return self.option == "spot" and is_stale_spot(self.price)

    @property
    def p95_usd_per_hour(self) -> float:
        """95th percentile of the price; the price itself where it is current."""
        price, on_demand = self.price, self.offer.on_demand
        if not self.stale:
            return price.usd_per_hour
        cap = on_demand.usd_per_hour if on_demand else None
        zones = [price.usd_per_hour, *(zone.usd_per_hour for zone in self.offer.spot_by_zone)]
        return price_age.p95_usd_per_hour(self.offer.instance.name, zones, cap, age_days(price.as_of))

    @property
    def in_short(self) -> str:
        """The option in words: "spot", "reserved and on-demand"."""
        return f"{self.option} and on-demand" if self.topped_up else self.option

    @property
    def next_blocks(self) -> tuple[NextBlock, ...]:
        """The blocks that follow, as a plan has them."""
        return tuple(
            NextBlock(capacity_reservation_id=owned.capacity_reservation_id, **owned.capacity_block.model_dump())
            for owned in self.following
            if owned.capacity_block and owned.capacity_reservation_id
        )

    @property
    def committed(self) -> bool:
        """True for a new one-year commitment."""
        return self.option == "reserved" and self.reservation is None


def pool_hazard(offer: Offer, zone_id: str) -> Hazard:
    """Hazard of an offer's spot pool in a zone ("": in any): of its band, and of the events that own stacks saw."""
    prior = spot_hazard(offer.interruptions, multi_gpu=offer.instance.gpu_count > 1)
    learned = [pool for pool in offer.learned_spot if zone_id in (pool.name.zone_id, "")]
    return learn_hazard(prior, learned, datetime.now(UTC))


def list_purchases(offer: Offer, limits: Constraints, *, every_zone: bool = False) -> list[PricedPurchase]:
    """Every purchase of one offer that the limits allow and the catalog has a price for.

    Spot nodes come from the cheapest zone; from ``every_zone``, or where own events tell the zones apart, from each.
    """
    purchases, options, now = [], limits.purchase_options, datetime.now(UTC)
    if "on-demand" in options and offer.on_demand:
        purchases.append(PricedPurchase(option="on-demand", offer=offer, price=offer.on_demand))
    if "spot" in options and offer.spot:
        fallback = limits.spot_fallback == "on-demand"
        # An on-demand base of one node, never reclaimed, keeps the rendezvous and the newest checkpoint at hand.
        bases = (0, 1) if offer.on_demand and (fallback or "on-demand" in options) else () if fallback else (0,)
        purchases += [
            PricedPurchase(option="spot", offer=offer, price=price, hazard=hazard, fallback=fallback, base=base)
            for price in (offer.spot_by_zone if every_zone or offer.learned_spot else (offer.spot,))
            for hazard in [pool_hazard(offer, price.zone_id)]
            for base in bases
        ]
    if "reserved" in options and offer.reserved_1yr:
        purchases.append(PricedPurchase(option="reserved", offer=offer, price=offer.reserved_1yr))
    for owned, *following in _chain_blocks(limits.usable_reservations, now):
        if (owned.instance_type, owned.region) == (offer.instance.name, offer.region):
            as_of = offer.on_demand.as_of if offer.on_demand else offer.instance.as_of
            price = HourlyPrice(
                usd_per_hour=owned.usd_per_hour or 0.0, source="the request: an existing reservation", as_of=as_of
            )
            blocks = [each.capacity_block for each in (owned, *following) if each.capacity_block]
            purchase = PricedPurchase(
                option=owned.option,
                offer=offer,
                price=price,
                reservation=owned,
                hours=usable_hours(blocks, now) if blocks else math.inf,
                gaps=block_gaps(blocks, now),
                following=tuple(following),
                fallback=bool(blocks and offer.on_demand and limits.spot_fallback == "on-demand"),
            )
            purchases.append(purchase)
            # A second group of nodes on demand goes beside a reservation that has an id. A block's instances are of a
            # market type of their own: https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html
            takes_top_up = owned.capacity_reservation_id is not None and not blocks
            if takes_top_up and "on-demand" in options and offer.on_demand:
                purchases.append(replace(purchase, topped_up=True))
    return purchases


def _chain_blocks(reservations: Iterable[ExistingReservation], now: datetime) -> list[list[ExistingReservation]]:
    """Return each reservation, and the Capacity Blocks of the same nodes and price as one, in the order of times."""
    chains: dict[Hashable, list[ExistingReservation]] = {}
    for number, owned in enumerate(reservations):
        nodes = (owned.instance_type, owned.region, owned.count, owned.usd_per_hour or 0.0)
        chains.setdefault(nodes if owned.capacity_block else number, []).append(owned)
    return [
        [owned for owned in chain if not (block := owned.capacity_block) or usable_hours([block], now)][:MOST_BLOCKS]
        or chain[-1:]
        for chain in (sorted(chain, key=_begin) for chain in chains.values())
    ]


def _begin(owned: ExistingReservation) -> datetime:
    return owned.capacity_block.start if owned.capacity_block else datetime.min.replace(tzinfo=UTC)


def find_purchases(problem: Problem, instance: InstanceType) -> list[PricedPurchase] | Rejection:
    """Every purchase of one type in the problem's regions, regions without an offer but with a reservation included.

    Rejects a type without one: its disks hold too little, no region offers it, or the catalog has no price.
    """
    if rejected := _reject_disk(problem, instance):
        return rejected
    limits, regions = problem.request.constraints, problem.regions
    offers = [offer for region in regions if (offer := problem.catalog.offer(instance.name, region)) is not None]
    offered = [offer.region for offer in offers]
    unoffered = {owned.region for owned in limits.existing_reservations} & set(regions) - set(offered)
    offers += [Offer(instance=instance, region=region) for region in sorted(unoffered)]
    found = [purchase for offer in offers for purchase in list_purchases(offer, limits)]
    if found:
        return found
    if not offered:
        wanted = ", ".join(limits.regions) or "any region"
        return Rejection(instance.name, f"not offered in {wanted}", "region", wanted, None)
    options, more = ", ".join(limits.purchase_options), " ..." if len(offered) > 3 else ""
    reason = f"the catalog has no {options} price of it in {', '.join(offered[:3])}{more}"
    return Rejection(instance.name, reason, "price", options, None)


def _reject_disk(problem: Problem, instance: InstanceType) -> Rejection | None:
    """Reject a type whose disks are too small for the training data."""
    work, space = problem.request.workload, disk_gib(instance, Volumes())
    size = work.data_gib
    if size is None or work.lustre_gib is not None or size <= space:
        return None
    disk = "NVMe" if instance.nvme_gb else "root volume"
    reason = f"each node copies {size:,.0f} GiB of data, and its {disk} has room for {space:,.0f} GiB"
    return Rejection(instance.name, reason, "data", size, space)
