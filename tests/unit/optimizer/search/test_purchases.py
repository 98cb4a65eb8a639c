"""Purchases: reservations, Capacity Blocks, spot with base and fallback, new commitments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from infra.refusals import plan_refusals
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.recommend import Recommendation
from optimizer.search.candidates import Candidate, find_candidates
from optimizer.search.plan_builder import build_plans
from optimizer.search.problem import Problem
from tests.unit.optimizer.search.requests import answer, calibration, catalog, request

P4D: dict[str, Any] = {"instance_types": ["p4d"], "regions": ["us-east-1"]}


def owned(count: int, **more: Any) -> dict[str, Any]:
    place = {"instance_type": "p4d.24xlarge", "region": "us-east-1", "capacity_reservation_id": "cr-0abcdef1"}
    return place | {"count": count} | more


def block(hours: float, count: int = 1) -> dict[str, Any]:
    """A Capacity Block of p4d.24xlarge that began just now."""
    now = datetime.now(UTC)
    times = {"start": now.isoformat(), "end": (now + timedelta(hours=hours)).isoformat()}
    return owned(count, capacity_block=times)


def test_owned_capacity_is_used_and_costs_the_price_that_the_owner_gives() -> None:
    best = answer(existing_reservations=[owned(2)]).plans[0]
    assert (best.purchase.option, best.purchase.capacity_reservation_id) == ("reserved", "cr-0abcdef1")
    assert best.node_count <= 2
    assert best.cost_usd.breakdown.compute == 0


def test_three_owned_nodes_all_work_where_the_batch_is_chosen() -> None:
    """24 ranks divide no power of two, so that one of the three stayed idle."""
    limits = {"existing_reservations": [owned(3)], "purchase_options": ["reserved"], **P4D}
    best = answer(objective="time", work={"global_batch": None}, **limits).plans[0]
    assert best.node_count == 3 and best.job.global_batch % 24 == 0
    assert answer(work={"global_batch": 64}, existing_reservations=[owned(3)]).plans[0].job.global_batch == 64


def test_owned_nodes_are_topped_up_on_demand_where_they_alone_are_too_slow() -> None:
    limits: dict[str, Any] = {"existing_reservations": [owned(2, usd_per_hour=3.0)], **P4D, "max_nodes": 8}
    alone = answer(**limits).plans[0]
    assert alone.purchase.on_demand_top_up == 0
    plan = answer(**limits, deadline_hours=alone.hours.p95 * 0.6).plans[0]
    top_up = plan.purchase.on_demand_top_up
    assert (plan.purchase.option, plan.node_count - top_up) == ("reserved", 2) and top_up > 0
    assert plan.purchase.capacity_reservation_id == "cr-0abcdef1"
    prices = {str(node.market): usd for node, usd in plan.node_prices_usd_per_hour.items()}
    assert prices["owned-reservation"] == 3.0
    hourly = 2 * 3.0 + top_up * prices["on-demand"]
    assert plan.cost_usd.breakdown.compute == pytest.approx(hourly * plan.hours.expected, rel=1e-4, abs=0.006)  # cents
    meeting = plan.interruption
    assert meeting.checkpoint_usd
    saved = (plan.hours.expected - RESTART_HOURS) * 3600 / meeting.checkpoint_interval_s * meeting.checkpoint_usd
    running = (plan.cost_usd.expected - plan.cost_usd.breakdown.compute - saved) / plan.hours.expected
    assert plan.reserve_usd == pytest.approx((hourly + running) * plan.reserve_s / 3600, rel=1e-4, abs=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {"purchase_options": ["reserved"]},
        {"existing_reservations": [owned(2, capacity_reservation_id=None, usd_per_hour=0.0)]},
        {"existing_reservations": [block(1000, 2)]},
    ],
    ids=["on-demand not allowed", "no reservation yet", "a block"],
)
def test_what_one_group_cannot_hold_is_not_topped_up(changes: dict[str, Any]) -> None:
    limits: dict[str, Any] = {"existing_reservations": [owned(2)], **P4D, "max_nodes": 8, **changes}
    found = answer(**limits)
    assert not any(plan.purchase.on_demand_top_up for plan in (*found.plans, *found.pareto))


@pytest.mark.parametrize(
    ("model", "count", "kept_s"),
    [
        # The shortest time to save; 783 GiB at the 0.396 GiB/s of one node, and two steps.
        ("gpt2-xl", 1, (540, 541)),
        ("llama-3.1-70b", 8, (783 / 0.396 + 300, 783 / 0.396 + 400)),
    ],
)
def test_a_capacity_block_is_used_when_the_run_ends_before_it(
    model: str, count: int, kept_s: tuple[float, float]
) -> None:
    limits: dict[str, Any] = {"purchase_options": ["capacity-block"], "instance_types": ["p4d.24xlarge"]}
    # One node writes replicas, several write shards together.
    limits |= {"parallelism": ["data", "tensor", "pipeline"], "sharding": ["ddp"]}

    def within(hours: float) -> Recommendation:
        blocks = [block(hours, count)]
        return answer(model, work={"samples": 20_000}, max_nodes=count, existing_reservations=blocks, **limits)

    plan = within(2000).plans[0]
    assert plan.purchase.option == "capacity-block"
    assert plan.purchase.capacity_block is not None
    assert kept_s[0] <= plan.reserve_s < kept_s[1]
    # The controller drains this long before the end, so that all is saved before AWS ends the instances.
    kept = 0.5 + plan.reserve_s / 3600
    assert within(plan.hours.p95 + kept + 0.01).plans[0].hours == plan.hours
    short = within(plan.hours.p95 + kept - 0.01)
    assert not short.plans
    (why,) = short.rejected
    assert why.binding_constraint == "capacity-block"
    assert why.value == pytest.approx(plan.hours.p95, rel=1e-3)
    assert why.limit == pytest.approx(plan.hours.p95 - 0.01, abs=5e-3)


def test_blocks_of_the_same_nodes_are_one_purchase_and_the_market_follows_where_asked() -> None:
    limits: dict[str, Any] = {"purchase_options": ["capacity-block"], **P4D, "spot_fallback": "on-demand"}
    limits["work"] = {"samples": 20_000_000}
    alone = answer(existing_reservations=[block(2000)], **limits).plans[0]
    now, half = datetime.now(UTC), alone.hours.p95 / 2 + 2
    times = {"start": (now + timedelta(days=30)).isoformat(), "end": (now + timedelta(days=30, hours=half)).isoformat()}
    later = owned(1, capacity_block={**times, "zone_id": "use1-az4"}, capacity_reservation_id="cr-0abcdef2")
    assert not answer(existing_reservations=[block(half)], **{**limits, "spot_fallback": "none"}).plans
    part = answer(existing_reservations=[block(half)], **limits).plans[0]
    ((usd_per_hour,),) = ([usd for node, usd in part.node_prices_usd_per_hour.items() if node.market == "on-demand"],)
    after = half - 0.5 - part.reserve_s / 3600
    assert part.cost_usd.breakdown.compute == pytest.approx((part.hours.expected - after) * usd_per_hour, rel=1e-3)
    beyond = part.cost_usd.p95 - alone.cost_usd.p95
    assert beyond == pytest.approx((part.hours.p95 - after) * usd_per_hour, rel=0.01), "the ceiling pays the market"
    found = answer(existing_reservations=[later, block(half)], **limits)
    plan = found.plans[0]
    assert not any("is not used" in note for note in found.notes)
    assert (plan.purchase.capacity_reservation_id, plan.purchase.fallback) == ("cr-0abcdef1", "on-demand")
    (following,) = plan.purchase.next_blocks
    assert (following.capacity_reservation_id, following.zone_id) == ("cr-0abcdef2", "use1-az4")
    # The blocks are paid, and enough.
    assert plan.cost_usd.breakdown.compute == 0
    assert any(node.market == "on-demand" for node in plan.node_prices_usd_per_hour)


def test_the_hours_between_blocks_of_a_row_count_with_what_all_but_the_nodes_costs() -> None:
    """The second block begins days later: the run waits for it, and its endpoints and storage are paid."""
    limits: dict[str, Any] = {"purchase_options": ["capacity-block"], **P4D, "work": {"samples": 20_000_000}}
    alone = answer(existing_reservations=[block(2000)], **limits).plans[0]
    half, now = alone.hours.p95 / 2 + 2, datetime.now(UTC)

    def row(days: float, **changes: Any) -> Recommendation:
        begin = now + timedelta(hours=half, days=days)
        times = {"start": begin.isoformat(), "end": (begin + timedelta(hours=half)).isoformat()}
        later = owned(1, capacity_block=times, capacity_reservation_id="cr-0abcdef2")
        priced = [each | {"usd_per_hour": 2.0} for each in (block(half), later)]
        return answer(existing_reservations=priced, **limits, **changes)

    near, far = row(0).plans[0], row(10).plans[0]
    saves_h = near.hours.p95 - alone.hours.p95  # a save, the block's last half an hour, and the next one's boot
    assert saves_h == pytest.approx(1 + near.reserve_s / 3600, rel=0.01)
    assert far.hours.p95 - near.hours.p95 == pytest.approx(240, rel=1e-3)
    assert far.hours.expected - near.hours.expected == pytest.approx(240, rel=1e-3)
    parts = near.cost_usd.breakdown
    beside = 240 / near.hours.expected * (parts.volumes + parts.transfer + parts.head_node)
    more = far.cost_usd.expected - near.cost_usd.expected
    assert beside - 0.05 < more < beside + 240 / near.hours.expected * parts.storage
    assert far.cost_usd.p95 - near.cost_usd.p95 == pytest.approx(more, abs=0.03)
    assert far.compute_usd_per_hour == pytest.approx(near.compute_usd_per_hour, rel=1e-3)
    assert far.compute_usd_per_hour == pytest.approx(2.0, rel=0.02)
    assert far.interruption.lost_hours - near.interruption.lost_hours == pytest.approx(240, rel=1e-3)
    assert not [*plan_refusals(far)], "the program compares the same hours with the same row"
    late = row(10, deadline_hours=near.hours.p95 + 100)
    assert not late.plans and late.rejected[0].binding_constraint == "deadline"


def test_a_capacity_block_that_is_over_is_named() -> None:
    times = {"start": "2025-12-01T11:30:00Z", "end": "2025-12-03T11:30:00Z"}
    notes = answer(existing_reservations=[owned(2, capacity_block=times)], max_nodes=2).notes
    (note,) = (note for note in notes if "--compile" not in note)
    assert "2 p4d.24xlarge in us-east-1 is not used: its Capacity Block is over" in note and "2025-12-03 11:00" in note


@pytest.mark.parametrize(
    ("model", "make", "why"),
    [
        ("gpt2-xl", partial(block, 0.6, 2), "the fastest run takes"),
        ("gpt2-xl", partial(owned, 2, usd_per_hour=1e6), "the cheapest run needs"),
        ("llama-3.1-70b", partial(block, 2000), "the fewest nodes of p4d.24xlarge that the training fits on are"),
    ],
    ids=["too short a block", "too dear", "too few nodes"],
)
def test_owned_nodes_that_no_plan_uses_are_named(model: str, make: Callable[[], dict[str, Any]], why: str) -> None:
    found = answer(model, existing_reservations=[make()], instance_types=["p4d"], max_nodes=4, budget_usd=1e6)
    assert found.plans and {plan.instance_type for plan in found.plans} == {"p4d.24xlarge"}
    assert not any(plan.purchase.capacity_reservation_id for plan in found.plans)
    (note,) = [note for note in found.notes if "reservation of" in note]
    assert f"p4d.24xlarge in us-east-1 is not used: {why}" in note


def test_a_reservation_that_is_too_small_for_the_model_is_a_rejection() -> None:
    """Without another purchase the answer was a traceback."""
    found = answer("llama-3.1-70b", existing_reservations=[block(2000)], **P4D, purchase_options=["capacity-block"])
    (why,) = found.rejected
    assert not found.plans and why.binding_constraint == "memory" and why.value > why.limit == 1


def test_owned_nodes_that_other_plans_beat_are_named() -> None:
    """One small node of one's own, topped up with dozens on demand, is no plan that anyone wants."""
    mine = owned(1) | {"instance_type": "g5.xlarge"}
    found = answer("llama-3.1-8b", existing_reservations=[mine], instance_types=[], max_nodes=64)
    (note,) = [note for note in found.notes if "reservation of" in note]
    assert "1 g5.xlarge in us-east-1 is not used: other plans are better; the cheapest on it costs" in note


def test_settings_of_spot_nodes_are_named_where_none_are_bought() -> None:
    asked = answer(**P4D, purchase_options=["on-demand"], spot_fallback="on-demand").notes
    named = [note.split(":")[0] for note in asked if "is not used" in note]
    assert named == ["spot_fallback on-demand is not used"]
    assert not any("spot_fallback" in note for note in answer(**P4D, spot_fallback="on-demand").notes)


def test_a_capacity_block_without_an_id_or_named_twice_is_refused() -> None:
    for blocks, why in (([block(9) | {"capacity_reservation_id": None}], "bought first"), ([block(9)] * 2, "twice")):
        with pytest.raises(InvalidInputError, match=why):
            request(existing_reservations=blocks)


def test_a_fallback_binds_the_budget_at_the_on_demand_price() -> None:
    limits: dict[str, Any] = {**P4D, "purchase_options": ["spot"], "max_nodes": 2}
    plain, both = answer(**limits).plans[0], answer(**limits, spot_fallback="on-demand").plans[0]
    assert (plain.purchase.fallback, both.purchase.fallback) == ("none", "on-demand")
    on_demand = {price.item: price.usd for price in both.prices}["on-demand p4d.24xlarge us-east-1"]
    # A closed band's pool loses nodes so rarely that the fallback costs cents; an open one's costs nearly on-demand.
    assert 0 <= both.cost_usd.expected - plain.cost_usd.expected < 1
    open_band: dict[str, Any] = {"instance_types": ["g5.48xlarge"], "regions": ["us-east-1"], "max_nodes": 1}
    costs = [
        answer(purchase_options=[option], spot_fallback=fallback, **open_band).plans[0].cost_usd.expected
        for option, fallback in (("spot", "none"), ("spot", "on-demand"), ("on-demand", "none"))
    ]
    assert 1.2 * costs[0] < costs[1] < 1.2 * costs[2]
    assert both.cost_usd.p95 >= on_demand * both.node_count * both.hours.p50
    limits |= {"max_nodes": both.node_count, "budget_usd": (plain.cost_usd.p95 + both.cost_usd.p95) / 2}
    assert answer(**limits).plans
    assert not answer(**limits, spot_fallback="on-demand").plans


def test_a_new_commitment_costs_its_whole_year() -> None:
    plan = answer(purchase_options=["reserved"], instance_types=["p4d"], max_nodes=1).plans[0]
    offer = catalog().offer("p4d.24xlarge", plan.region)
    assert offer is not None and offer.reserved_1yr is not None
    assert plan.cost_usd.breakdown.compute == pytest.approx(offer.reserved_1yr.usd_per_hour * 8760, rel=1e-6)


def test_spot_with_a_base_pays_both_prices() -> None:
    """Nodes on demand need the user's word: a request for spot alone got one beside its spot nodes."""
    problem = Problem.resolve(request(purchase_options=["spot"], **P4D), catalog(), calibration())
    (table,), _ = find_candidates(problem)
    assert not any(purchase.base for purchase in table.purchases)
    problem = problem.revise(purchase_options=("spot", "on-demand"))
    (table,), _ = find_candidates(problem)
    based = [row for row, index in enumerate(table.purchase) if table.purchases[index].base]
    assert based
    for row in based:
        purchase = table.purchases[table.purchase[row]]
        assert purchase.offer.on_demand is not None
        nodes = int(table.fastest.nodes[table.configuration[row]])
        hourly = purchase.offer.on_demand.usd_per_hour + (nodes - 1) * purchase.price.usd_per_hour
        waiting = table.outcome.waiting_hours[row] * (hourly - purchase.price.usd_per_hour)
        assert table.cost.compute[row] == pytest.approx(hourly * table.outcome.running_hours[row] + waiting)
        (plan,) = build_plans(problem, [Candidate(table, row)])
        assert plan.purchase.on_demand_base == 1
        assert [price.item.split()[0] for price in plan.prices if price.per == "hour"] == ["spot", "on-demand"]
