"""Quotes: prices that the user negotiated, in place of the catalog's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optimizer.catalog import Catalog
from optimizer.contract.hardware import HourlyPrice, Offer
from optimizer.contract.plan import QUOTE
from optimizer.contract.request import Quote


def with_quotes(catalog: Catalog, quotes: Sequence[Quote]) -> Catalog:
    """Lay quotes over the catalog's prices; InvalidInputError for a type or region that the catalog lacks."""
    if not quotes:
        return catalog
    offers = {(offer.instance.name, offer.region): offer for offer in catalog.offers}
    for quote in quotes:
        place = (quote.instance_type, quote.region)
        offer = catalog.offer(*place) and offers[place]
        price = HourlyPrice(usd_per_hour=quote.usd_per_hour, source=f"{QUOTE}{quote.source}", as_of=quote.as_of)
        offer = offer or Offer(instance=catalog.instance_type(quote.instance_type), region=quote.region)
        changes: dict[str, Any] = {
            {"on-demand": "on_demand", "reserved": "reserved_1yr", "spot": "spot"}[quote.option]: price
        }
        if quote.option == "spot":
            changes["dearer_spot"] = ()
        offers[place] = replace(offer, **changes)
    return replace(catalog, offers=tuple(offers[place] for place in sorted(offers)))
