"""Rules that every catalog keeps; ``catalog verify``, each refresh and each reading of a user's snapshot check them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import NamedTuple

from optimizer.catalog.model import UNIT_ITEMS, Catalog
from optimizer.contract.hardware import InstanceType, Offer
from optimizer.contract.spelling import REGION, ZONE_ID


class InvariantViolation(NamedTuple):
    """One broken rule, the row that breaks it and the value there."""

    rule: str
    place: str
    value: str

    def __str__(self) -> str:
        return f"{self.place}: {self.value} (rule: {self.rule})"


def check(catalog: Catalog, *, today: date | None = None) -> list[InvariantViolation]:
    """Broken rules of ``catalog``; empty when sound. No fact may be dated after ``today``, or after the snapshot."""
    latest = today or catalog.made_at.date()
    return [InvariantViolation(*problem) for problem in _catalog_problems(catalog, latest)]


def _catalog_problems(catalog: Catalog, latest: date) -> Iterator[tuple[str, str, str]]:
    for name, count in Counter(instance.name for instance in catalog.instance_types).items():
        if count > 1:
            yield "a type has one row", name, f"{count} rows"
    for (name, region), count in Counter((offer.instance.name, offer.region) for offer in catalog.offers).items():
        if count > 1:
            yield "a type has one offer in a region", f"{name} in {region}", f"{count} offers"
    for instance in catalog.instance_types:
        for rule, value in type_problems(instance, latest):
            yield rule, instance.name, value
    for offer in catalog.offers:
        for rule, value in (*price_problems(offer, latest), *_place_problems(offer)):
            yield rule, f"{offer.instance.name} in {offer.region}", value
    for unit in catalog.unit_prices:
        place = f"{unit.item} in {unit.region}"
        if not 0 < unit.usd < float("inf"):
            yield "a price is above 0 USD", place, str(unit.usd)
        if not unit.source or unit.as_of > latest:
            yield "a price has a source and a date not in the future", place, f"{unit.source!r}, {unit.as_of}"
    for item in UNIT_ITEMS:
        if not any(unit.item == item for unit in catalog.unit_prices):
            yield "every unit price is known in at least one region", item, "0 regions"


def type_problems(instance: InstanceType, latest: date) -> Iterator[tuple[str, str]]:
    """Rule and value of each violation in an instance type's facts."""
    gpu, fraction = instance.gpu, min(1.0, instance.gpu_count)
    if abs(instance.gpu_memory_gib - gpu.memory_gib * fraction) > 0.01:
        yield (
            "GPU memory is the GPU table's, times the fraction",
            f"{instance.gpu_memory_gib} GiB, and {fraction:g} of {gpu.key} is {gpu.memory_gib * fraction:g} GiB",
        )
    if instance.vcpus < 1 or not instance.memory_gib > 0 or not instance.nvme_gb >= 0:
        yield (
            "a type has processors and memory",
            f"{instance.vcpus} vCPUs, {instance.memory_gib} GiB, NVMe {instance.nvme_gb} GB",
        )
    if not instance.network_gbit_per_s > 0 or instance.network_cards < 1:
        yield "a type has a network", f"{instance.network_gbit_per_s} Gbit/s, {instance.network_cards} cards"
    if min(instance.card_interfaces, default=1) < 1:
        yield "a network card takes an interface", f"{list(instance.card_interfaces)} interfaces by card"
    if not 0 <= instance.efa_cards <= instance.network_cards:
        yield "EFA cards are network cards", f"{instance.efa_cards} EFA of {instance.network_cards} cards"
    if instance.interconnect in ("nvlink", "nvswitch") and not gpu.nvlink_gb_per_s > 0:
        yield "a type linked by NVLink has a GPU with NVLink", f"{instance.interconnect}, {gpu.key}"
    if not instance.source or instance.as_of > latest:
        yield "a fact has a source and a date not in the future", f"{instance.source!r}, {instance.as_of}"


def price_problems(offer: Offer, latest: date) -> Iterator[tuple[str, str]]:
    """Rule and value of each violation in an offer's prices."""
    for kind, price in offer.prices:
        if not 0 < price.usd_per_hour < float("inf"):
            yield "a price is above 0 USD per hour", f"{kind} {price.usd_per_hour}"
        if not price.source or price.as_of > latest:
            yield "a price has a source and a date not in the future", f"{kind}: {price.source!r}, {price.as_of}"
        if kind not in ("on-demand", "capacity-block") and offer.on_demand and price.is_above(offer.on_demand):
            yield (
                f"{kind} is at most on-demand",
                f"{price.usd_per_hour} above {offer.on_demand.usd_per_hour} USD per hour",
            )


def _place_problems(offer: Offer) -> Iterator[tuple[str, str]]:
    if not re.match(REGION, offer.region):
        yield "a region is named as AWS names it", offer.region
    if local := [zone for zone in offer.zone_ids if not re.match(ZONE_ID, zone)]:
        yield "zone ids are of a region's own zones", ", ".join(local)
    spot = offer.spot_by_zone
    for price in spot:
        if price.zone_id and offer.zone_ids and price.zone_id not in offer.zone_ids:
            yield "a spot price is of a zone that offers the type", price.zone_id
    if len(spot) > 1 and len({price.zone_id for price in spot} - {""}) < len(spot):
        yield "a region has one spot price, or one a zone", " ".join(price.zone_id or "-" for price in spot)
    if list(spot) != sorted(spot, key=lambda price: price.usd_per_hour):
        yield "the cheapest zone's spot price is first", " ".join(f"{price.usd_per_hour}" for price in spot)
    if offer.interruptions is not None:
        low, high, *_ = offer.interruptions
        if not (0 <= low < 1 and (high is None or low < high < 1)):
            yield "an interruption band is a share of instances", f"{low} to {high}"
