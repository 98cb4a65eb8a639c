"""Each invariant notices the catalog that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from optimizer.catalog import Catalog, invariants
from optimizer.contract.hardware import HourlyPrice, InterruptionBand, Zones


def _type(name: str = "p5.48xlarge", **changes: Any) -> Callable[[Catalog], Catalog]:
    def change(catalog: Catalog) -> Catalog:
        types = {i.name: i for i in catalog.instance_types}
        types[name] = replace(types[name], **changes)
        return replace(catalog, instance_types=tuple(types.values()))

    return change


def _offer(**changes: Any) -> Callable[[Catalog], Catalog]:
    def change(catalog: Catalog) -> Catalog:
        offers = {(o.instance.name, o.region): o for o in catalog.offers}
        key = ("p4d.24xlarge", "us-east-1")
        offers[key] = replace(offers[key], **changes)
        return replace(catalog, offers=tuple(offers.values()))

    return change


def _price(usd: float, source: str = "test", as_of: date = date(2026, 1, 1), zone_id: str = "") -> HourlyPrice:
    return HourlyPrice(usd_per_hour=usd, source=source, as_of=as_of, zone_id=zone_id)


def _zone(zone_id: str) -> Zones:
    return Zones((zone_id,), "test", date(2026, 1, 1))


FUTURE = date(2027, 1, 1)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: replace(c, instance_types=(*c.instance_types, c.instance_types[0])), "a type has one row"),
        (lambda c: replace(c, offers=(*c.offers, c.offers[0])), "a type has one offer in a region"),
        (_type(gpu_memory_gib=40), "GPU memory is the GPU table's"),
        (_type(vcpus=0), "a type has processors and memory"),
        (_type(network_gbit_per_s=0), "a type has a network"),
        (_type("g5.48xlarge", interconnect="nvlink"), "a type linked by NVLink has a GPU with NVLink"),
        (_type(efa_cards=33), "EFA cards are network cards"),
        (_type(card_interfaces=(0,) * 32), "a network card takes an interface"),
        (_type(source=""), "a fact has a source"),
        (_type(as_of=FUTURE), "a fact has a source"),
        (_offer(on_demand=_price(0)), "a price is above 0 USD per hour"),
        (_offer(on_demand=_price(-1)), "a price is above 0 USD per hour"),
        (_offer(spot=_price(float("nan"))), "a price is above 0 USD per hour"),
        (_offer(spot=_price(10, source="")), "a price has a source"),
        (_offer(spot=_price(10, as_of=FUTURE)), "a price has a source"),
        (_offer(spot=_price(99)), "spot is at most on-demand"),
        (_offer(reserved_1yr=_price(99)), "reserved is at most on-demand"),
        (_offer(capacity_block=_price(-1)), "a price is above 0 USD per hour"),
        (_offer(region="US East"), "a region is named as AWS names it"),
        (_offer(zones=_zone("usw2-lax1-az1")), "zone ids are of a region's own zones"),
        (
            _offer(zones=_zone("use1-az1"), spot=_price(9, zone_id="use1-az2")),
            "a spot price is of a zone that offers",
        ),
        (_offer(interruptions=InterruptionBand(0.2, 0.1, "test", FUTURE)), "an interruption band is a share"),
        (_offer(interruptions=InterruptionBand(0.2, 1.0, "test", FUTURE)), "an interruption band is a share"),
        (lambda c: replace(c, unit_prices=(replace(c.unit_prices[0], usd=0), *c.unit_prices[1:])), "above 0 USD"),
        (lambda c: replace(c, unit_prices=(replace(c.unit_prices[0], source=""), *c.unit_prices[1:])), "has a source"),
        (lambda c: replace(c, unit_prices=()), "every unit price is known"),
    ],
)
def test_a_broken_rule_is_found(catalog: Catalog, change: Callable[[Catalog], Catalog], rule: str) -> None:
    found = invariants.check(change(catalog))
    assert any(rule in violation.rule for violation in found), found
    assert all(violation.place and violation.value for violation in found)
