"""Select and sort offers by ranges (8.., ..4, 2..8, 8), names and patterns, which are checked against the catalog."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from optimizer.catalog.model import Catalog
from optimizer.contract.hardware import HourlyPrice, Offer

PricedAs = Literal["on-demand", "reserved", "capacity-block", "spot"]


# Least and greatest number, both included.
Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


def parse_range(text: str) -> Range:
    """Read "8.." (at least), "..4" (at most), "2..8" (between) or "8" (exactly); ValueError otherwise."""
    number = r"[0-9]+(?:\.[0-9]+)?"
    match = re.fullmatch(rf"\s*(?:({number})|({number})?\s*\.\.\s*({number})?)\s*", text)
    exact, low, high = match.groups() if match else (None, None, None)
    least, greatest = float(exact or low or -math.inf), float(exact or high or math.inf)
    if not (exact or low or high) or least > greatest:
        raise ValueError(f"{text!r} is not a range; write 8 (exactly), 8.. (at least), ..8 (at most) or 2..8")
    return least, greatest


def select(
    catalog: Catalog,
    *,
    gpus: Sequence[str] = (),
    count: Range = ANY,
    memory_gib: Range = ANY,
    regions: Sequence[str] = (),
    types: Sequence[str] = (),
) -> list[Offer]:
    """Offers that meet all conditions, in the catalog's order; InvalidInputError for a name that no offer has.

    ``gpus`` are models ("H100") or keys ("a100-80gb"), ``regions`` and ``types`` names or shell patterns ("p5*");
    ``memory_gib`` is of one GPU, as EC2 reports it.
    """
    gpu_keys = catalog.gpu_keys(gpus)
    in_regions, of_types = set(catalog.match("region", regions)), set(catalog.match("instance type", types))
    return [
        offer
        for offer in catalog.offers
        if (gpu_keys is None or offer.instance.gpu.key in gpu_keys)
        and count[0] <= offer.instance.gpu_count <= count[1]
        and memory_gib[0] <= offer.instance.gpu_memory_gib <= memory_gib[1]
        and offer.region in in_regions
        and offer.instance.name in of_types
    ]


def sort(offers: Iterable[Offer], priced_as: PricedAs) -> list[Offer]:
    """Sort offers by the price of a GPU, the cheapest first and offers without a price last."""

    def usd(offer: Offer) -> float:
        price = price_of(offer, priced_as)
        return price.usd_per_hour / offer.instance.gpu_count if price else math.inf

    return sorted(offers, key=lambda offer: (usd(offer), offer.instance.name, offer.region))


def price_of(offer: Offer, priced_as: PricedAs) -> HourlyPrice | None:
    """Price of this kind (spot: the cheapest zone's); None where no price was published."""
    return next((price for kind, price in offer.prices if kind == priced_as), None)
