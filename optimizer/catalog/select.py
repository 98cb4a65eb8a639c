"""Choosing offers: ranges as people write them (8.., ..4, 2..8, 8), names and patterns, checked against the catalog."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from optimizer.catalog.model import Catalog, unknown
from optimizer.errors import InvalidInputError
from optimizer.hardware import HourlyPrice, Offer

PricedAs = Literal["on-demand", "reserved", "spot"]
SortKey = Literal["price", "price-per-gpu", "type", "region"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def parse_range(text: str) -> Range:
    """Read "8.." (at least), "..4" (at most), "2..8" (between) or "8" (exactly).

    Raises:
        ValueError: none of these, or the ends are the wrong way round.
    """
    number = r"[0-9]+(?:\.[0-9]+)?"
    match = re.fullmatch(rf"\s*({number})?\s*(\.\.)?\s*({number})?\s*", text)
    low, dots, high = match.groups() if match else (None, None, None)
    if low is None and high is None:
        raise ValueError(f"{text!r} is not a range; write 8 (exactly), 8.. (at least), ..8 (at most) or 2..8")
    if not dots:
        if high is not None:
            raise ValueError(f"{text!r} is not a range; put two dots between the numbers, like 2..8")
        high = low
    found = Range(low=float(low) if low else -math.inf, high=float(high) if high else math.inf)
    if found.low > found.high:
        raise ValueError(f"{text!r} ends before it begins; write {high}..{low}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which offers to keep; an empty field keeps all.

    Attributes:
        gpus: GPU models ("H100") or keys ("a100-80gb"), in any case.
        count: GPUs of one instance.
        memory_gib: memory of one GPU, GiB, as EC2 reports it.
        regions, types: names or shell patterns ("us-*", "p5*").
        max_price_usd_per_hour: highest price of one instance, as ``priced_as``; an offer without that price goes.
        priced_as: the price ``max_price_usd_per_hour`` and sorting look at.
    """

    gpus: Sequence[str] = ()
    count: Range = Range()
    memory_gib: Range = Range()
    regions: Sequence[str] = ()
    types: Sequence[str] = ()
    max_price_usd_per_hour: float | None = None
    priced_as: PricedAs = "on-demand"


def select(catalog: Catalog, chosen: Filter) -> list[Offer]:
    """Offers that pass every part of ``chosen``, in the catalog's order.

    Raises:
        InvalidInputError: a GPU, region or type that no offer has; it names those that offers have.
    """
    gpu_keys = _gpu_keys(catalog, chosen.gpus)
    regions = _matching("region", chosen.regions, catalog.regions())
    types = _matching("instance type", chosen.types, [instance.name for instance in catalog.instance_types])
    return [
        offer
        for offer in catalog.offers
        if (gpu_keys is None or offer.instance.gpu.key in gpu_keys)
        and offer.instance.gpu_count in chosen.count
        and offer.instance.gpu_memory_gib in chosen.memory_gib
        and (regions is None or offer.region in regions)
        and (types is None or offer.instance.name in types)
        and _affordable(offer, chosen)
    ]


def sort(offers: Iterable[Offer], key: SortKey, priced_as: PricedAs) -> list[Offer]:
    """``offers`` in order; by price the cheapest first, and those without one last."""

    def price(offer: Offer) -> float:
        found = price_of(offer, priced_as)
        return found.usd_per_hour if found else math.inf

    keys: dict[SortKey, Callable[[Offer], tuple[object, ...]]] = {
        "price": lambda offer: (price(offer),),
        "price-per-gpu": lambda offer: (price(offer) / offer.instance.gpu_count,),
        "type": lambda offer: (offer.instance.name,),
        "region": lambda offer: (offer.region,),
    }
    return sorted(offers, key=lambda offer: (*keys[key](offer), offer.instance.name, offer.region))  # type: ignore[type-var, unused-ignore]


def price_of(offer: Offer, priced_as: PricedAs) -> HourlyPrice | None:
    """The price of that kind, or None where nobody published one."""
    return {"on-demand": offer.on_demand, "reserved": offer.reserved_1yr, "spot": offer.spot}[priced_as]


def _affordable(offer: Offer, chosen: Filter) -> bool:
    if chosen.max_price_usd_per_hour is None:
        return True
    price = price_of(offer, chosen.priced_as)
    return price is not None and price.usd_per_hour <= chosen.max_price_usd_per_hour


def _gpu_keys(catalog: Catalog, wanted: Sequence[str]) -> set[str] | None:
    if not wanted:
        return None
    used = {instance.gpu.key: instance.gpu for instance in catalog.instance_types}
    found: set[str] = set()
    for name in wanted:
        # "RTX PRO 6000", "rtx-pro-6000" and "RTXPRO6000" are one.
        plain = _plain(name)
        keys = {key for key, gpu in used.items() if plain in (_plain(gpu.name), _plain(key))}
        if not keys:
            raise unknown("GPU", name, sorted({gpu.name for gpu in used.values()}))
        found |= keys
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))


def _matching(kind: str, patterns: Sequence[str], known: Sequence[str]) -> set[str] | None:
    if not patterns:
        return None
    found: set[str] = set()
    for pattern in patterns:
        matches = [name for name in known if fnmatch.fnmatchcase(name.lower(), pattern.lower())]
        if not matches:
            if any(sign in pattern for sign in "*?["):
                raise InvalidInputError(
                    f"no {kind} matches {pattern!r}",
                    limit=f"one of {', '.join(sorted(known))}, or a pattern of them",
                )
            raise unknown(kind, pattern, known)
        found.update(matches)
    return found
