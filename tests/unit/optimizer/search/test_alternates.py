"""Alternates: every place within the limits, priced as a search for that place alone prices it, the cheapest first."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from optimizer.contract.plan import Alternate, FleetPlan, NodeItem
from optimizer.search.alternates import MAX_ALTERNATES, can_replace
from optimizer.search.fastest import SAME
from tests.unit.optimizer.search.requests import answer, catalog

A100: dict[str, Any] = {"instance_types": ["p4d", "p4de"], "regions": ["us-east-1"], "max_nodes": 2}


def place(alternate: Alternate) -> tuple[str, str, str]:
    return alternate.zone_id, alternate.instance_type, alternate.purchase


def gangs(**limits: Any) -> list[FleetPlan]:
    """Every plan of two nodes: those of the Pareto front, too."""
    found = answer("llama-3.1-8b", "pareto", {"samples": 30_000}, **A100 | limits)
    return [plan for plan in (*found.plans, *found.pareto) if plan.node_count > 1]


def test_alternates_are_other_places_cheapest_first_and_one_is_on_demand() -> None:
    plans = gangs()
    plans = [plan for plan in plans if plan.purchase.option == "spot"]
    assert plans
    for plan in plans:
        places = [place(alternate) for alternate in plan.alternates]
        own = (plan.purchase.zone_id, plan.instance_type, "spot")
        assert 2 < len(places) <= MAX_ALTERNATES and own not in places
        assert {alternate.purchase for alternate in plan.alternates} == {"spot", "on-demand"}
        usd = [
            alternate.cost_usd.expected * (1 if alternate.instance_type == plan.instance_type else 1 + SAME)
            for alternate in plan.alternates
        ]
        assert all(first <= second + 0.01 for first, second in pairwise(usd[:-1]))
        for alternate in plan.alternates:
            offer = catalog().offer(alternate.instance_type, plan.region)
            assert offer and alternate.zone_id in offer.zone_ids
            spot = next((each for each in offer.spot_by_zone if each.zone_id in (alternate.zone_id, "")), None)
            price = spot if alternate.purchase == "spot" else offer.on_demand
            assert price and alternate.price.usd == price.usd_per_hour
            assert (alternate.price.source, alternate.price.as_of) == (price.source, price.as_of)
            assert (alternate.node is None) == (alternate.instance_type == plan.instance_type)
    assert any(alternate.node for plan in plans for alternate in plan.alternates), "p4de takes p4d's layout"


def test_an_alternate_costs_and_takes_what_a_plan_of_that_place_does() -> None:
    (plan,) = answer(
        work={"samples": 3_000_000},
        instance_types=["p4d"],
        regions=["us-east-1"],
        max_nodes=1,
        purchase_options=["on-demand"],
    ).plans
    spot = answer(work={"samples": 3_000_000}, instance_types=["p4d"], regions=["us-east-1"], max_nodes=1).plans
    (spot_plan,) = (one for one in spot if one.purchase.option == "spot")
    assert plan.parallelism == spot_plan.parallelism and plan.node_count == spot_plan.node_count == 1
    on_demand = [one for one in spot_plan.alternates if one.purchase == "on-demand"]
    assert {one.zone_id for one in on_demand} <= set(plan.zone_ids) and on_demand
    for one in on_demand:
        assert (one.hours, one.cost_usd, one.interruption) == (plan.hours, plan.cost_usd, plan.interruption)
        assert (one.price, one.step_time_s) == (plan.prices[0], plan.step_time_s)
    dearer = [one for one in spot_plan.alternates if one.purchase == "spot"]
    assert dearer and all(one.hours == spot_plan.hours for one in dearer)
    assert all(one.cost_usd.expected > spot_plan.cost_usd.expected for one in dearer)


def test_a_spot_alternate_counts_with_the_plans_fallback() -> None:
    """Their p95 (232 USD) was that of spot alone, beside the plan's 570 of a run that never gets spot nodes."""
    plans = [plan for plan in gangs(spot_fallback="on-demand") if plan.purchase.option == "spot"]
    spot = [(plan, one) for plan in plans for one in plan.alternates if one.purchase == "spot"]
    assert {one.instance_type for _, one in spot} == {"p4d.24xlarge", "p4de.24xlarge"}
    for plan, one in spot:
        on_demand = NodeItem("on-demand", one.instance_type, plan.region)
        (usd,) = (price.usd for price in plan.prices if price.node == on_demand)
        assert one.cost_usd.p95 >= plan.node_count * usd * one.hours.expected
        assert plan.reserve_usd_at(one) == pytest.approx(plan.reserve_usd, rel=0.3)


def test_every_alternate_keeps_the_limits_at_p95_and_a_tighter_budget_leaves_fewer() -> None:
    free = gangs()
    needed = sorted(one.cost_usd.p95 + plan.reserve_usd_at(one) for plan in free for one in plan.alternates)
    budget = math.ceil(needed[len(needed) // 2])
    tight = gangs(budget_usd=budget, deadline_hours=max(plan.hours.p95 for plan in free))
    assert tight
    for plan in tight:
        for one in plan.alternates:
            assert one.cost_usd.p95 + plan.reserve_usd_at(one) <= budget + 0.02
            assert one.hours.p95 <= (plan.job.deadline_hours or 0) + 1e-3
    assert sum(len(plan.alternates) for plan in tight) < sum(len(plan.alternates) for plan in free)


def test_the_request_bounds_where_a_plan_may_go() -> None:
    for plan in gangs(purchase_options=["on-demand"]):
        assert plan.alternates and {one.purchase for one in plan.alternates} == {"on-demand"}
        assert plan.zone_ids[0] not in {one.zone_id for one in plan.alternates if not one.node}, "a gang's own zone"
    for plan in gangs(instance_types=["p4d"]):
        assert {one.instance_type for one in plan.alternates} == {"p4d.24xlarge"}
    lone = answer(work={"samples": 200_000}, instance_types=["p4d"], max_nodes=1, purchase_options=["on-demand"])
    assert not any(plan.alternates for plan in lone.plans), "a lone node's group has every zone already"
    current = [plan for plan in gangs() + list(answer(**A100).plans) if not plan.spot_range]
    assert current and all(one.purchase == "on-demand" for plan in current for one in plan.alternates), "prices are old"
    with_fallback = gangs(purchase_options=["spot"], spot_fallback="on-demand")
    assert with_fallback and not any(one.purchase == "on-demand" for plan in with_fallback for one in plan.alternates)
    owned = {
        "instance_type": "p4d.24xlarge",
        "region": "us-east-1",
        "capacity_reservation_id": "cr-0abcdef1",
        "count": 2,
    }
    reserved = answer(existing_reservations=[owned]).plans[0]
    assert reserved.purchase.option == "reserved" and not reserved.alternates


@pytest.mark.parametrize(
    ("own", "other", "replaces"),
    [
        ("p4d.24xlarge", "p4de.24xlarge", True),  # 80 GiB a GPU in place of 40
        ("p4de.24xlarge", "p4d.24xlarge", False),
        ("g6.8xlarge", "gr6.8xlarge", True),
        ("p5.48xlarge", "p5e.48xlarge", False),  # another GPU model: the node's checks refuse it
        ("p5e.48xlarge", "p5en.48xlarge", False),  # other network cards
    ],
)
def test_a_stack_boots_types_of_its_gpu_model_and_cards(own: str, other: str, replaces: bool) -> None:
    types = catalog().instance_type(own), catalog().instance_type(other)
    assert can_replace(*types) == replaces
