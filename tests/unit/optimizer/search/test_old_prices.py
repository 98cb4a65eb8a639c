"""Spot prices older than their limit: a plan at a current price is first, spot has a range and a wider spread."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any

import pytest

from optimizer.catalog import Catalog
from optimizer.commands.recommend.tables import describe_spot, plan_rows
from optimizer.contract.hardware import HourlyPrice, Offer
from optimizer.recommend import Recommendation, recommend
from optimizer.search.ranking import MAX_PLANS
from tests.unit.optimizer.search.requests import calibration, catalog, request

LIMITS: dict[str, Any] = {"instance_types": ["p4d.24xlarge", "g5.12xlarge"], "regions": ["us-east-1"], "max_nodes": 2}


def _dated(offer: Offer, as_of: date) -> Offer:
    def at(price: HourlyPrice) -> HourlyPrice:
        return replace(price, as_of=as_of, source="spot-price-history")

    return replace(offer, spot=offer.spot and at(offer.spot), dearer_spot=tuple(map(at, offer.dearer_spot)))


def _aged(days: int, *names: str) -> Catalog:
    as_of = datetime.now(UTC).date() - timedelta(days=days)
    offers = [_dated(o, as_of) if not names or o.instance.name in names else o for o in catalog().offers]
    return replace(catalog(), offers=tuple(offers))


@cache
def answered(days: int, *names: str, objective: str = "cost", purchase: str = "") -> Recommendation:
    limits = LIMITS | ({"purchase_options": [purchase]} if purchase else {})
    return recommend(request(objective=objective, **limits), _aged(days, *names), calibration())


def test_a_current_spot_price_heads_the_ranking_as_any_other() -> None:
    plans = answered(1).plans
    assert [plan.cost_usd.expected for plan in plans] == sorted(plan.cost_usd.expected for plan in plans)
    assert plans[0].purchase.option == "spot" and plans[0].spot_range is None
    assert "days old" not in describe_spot(plans)


def test_the_best_plan_at_a_list_price_comes_before_an_old_spot_price() -> None:
    fresh, old = answered(1).plans, answered(2).plans
    assert old[0].purchase.option == "on-demand"
    same = min((plan for plan in fresh if plan.purchase.option == "on-demand"), key=lambda p: p.cost_usd.expected)
    assert old[0] == same.model_copy(update={"alternates": old[0].alternates, "digest": old[0].digest})
    assert any(alternate.purchase == "spot" for alternate in same.alternates)
    assert not any(alternate.purchase == "spot" for alternate in old[0].alternates), "nor after one at a current price"
    # The cheaper plan at an old price comes after every plan at a current one.
    ages = [plan.spot_range is not None for plan in old]
    assert ages == sorted(ages) and min(plan.cost_usd.expected for plan in old) < old[0].cost_usd.expected


def test_an_old_spot_plan_has_its_zone_its_range_and_a_p95_that_grows_with_age() -> None:
    def p4d(days: int) -> Recommendation:
        return answered(days, purchase="spot")

    offer = catalog().offer("p4d.24xlarge", "us-east-1")
    assert offer is not None and offer.spot is not None
    by_age = [next(p for p in p4d(days).plans if p.instance_type == "p4d.24xlarge") for days in (1, 2, 136)]
    assert by_age[0].cost_usd.p95 < by_age[1].cost_usd.p95 < by_age[2].cost_usd.p95
    assert len({plan.cost_usd.expected for plan in by_age}) == 1
    assert all(plan.purchase.zone_id == offer.spot.zone_id == "use1-az1" for plan in by_age)
    prices = by_age[2].spot_range
    assert prices is not None and (prices.age_days, prices.limit_days, prices.zones) == (136, 1, 4)
    compute = by_age[2].cost_usd.breakdown.compute
    rise = 8.3524 / 2.5084
    if not by_age[2].purchase.on_demand_base:
        dearest = by_age[2].cost_usd.expected + compute * (rise - 1)
        assert prices.cost_usd_dearest == pytest.approx(dearest, abs=0.02)
    # Without a plan at a current price, spot is first, and its line says so.
    assert "136 days old: add --refresh" in describe_spot(p4d(136).plans)


def test_a_row_at_an_old_spot_price_has_one_zone_for_its_dollars_and_their_p95() -> None:
    """A range to the dearest zone (83 to 259 USD) stood beside the p95 of the plan's own zone (210)."""
    spot = answered(136, purchase="spot")
    for row in plan_rows(spot):
        shown = [float(figure.replace(",", "")) for figure in re.findall(r"[\d.,]+", row["usd"])]
        assert shown == [pytest.approx(row["cost_usd_expected"], rel=1e-3)] and shown[0] <= row["cost_usd_p95"]


def test_an_alternate_at_an_old_spot_price_is_marked_and_no_other() -> None:
    old, fresh = answered(136, purchase="spot").plans[0], answered(1, purchase="spot").plans[0]
    assert list(filter(old.is_old, old.alternates)) == [one for one in old.alternates if one.purchase == "spot"] != []
    assert fresh.alternates and not any(map(fresh.is_old, fresh.alternates))
    first = old.alternates[0]
    read_later = first.model_copy(update={"price": first.price.model_copy(update={"as_of": datetime.now(UTC).date()})})
    assert not old.is_old(read_later)


def test_one_line_says_what_a_refresh_settles() -> None:
    plans = answered(136).plans
    line = describe_spot(plans)
    old = next(plan for plan in plans if plan.spot_range)
    assert line.startswith(f"{old.node_count} x {old.instance_type} perhaps ") and "136 days old" in line
    # An old spot price above the current one changes nothing.
    assert describe_spot([plans[1].model_copy(update={"spot_range": None}), plans[1]]) == ""
    # Beside a first plan at a current spot price, its places and its policy are not the old one's.
    current = answered(1).plans[0]
    cheaper = old.model_copy(update={"cost_usd": old.cost_usd.model_copy(update={"expected": 0.01})})
    assert "; else " in describe_spot([current])
    assert describe_spot([current, cheaper]).endswith("add --refresh")


def test_twenty_plans_at_current_prices_leave_room_for_the_line_on_spot() -> None:
    work = {"tokens": "2B", "samples": None, "seq_len": 4096, "global_batch": None}
    asked = request("llama-3.1-8b", work=work, instance_types=[], regions=["us-east-1"], max_nodes=16)
    found = recommend(asked, _aged(136), calibration())
    assert len(found.plans) == MAX_PLANS and [plan.spot_range is None for plan in found.plans].count(False) == 1
    assert describe_spot(found.plans).startswith(f"{found.plans[-1].node_count} x {found.plans[-1].instance_type} ")


def test_a_current_spot_price_of_another_type_is_no_old_one() -> None:
    # The g5's prices are of today, the p4d's of the snapshot.
    first = answered(0, "g5.12xlarge").plans[0]
    assert first.spot_range is None
