"""Spot policies of a plan: the simulation agrees with the closed form, and the cheaper policy keeps the limits."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import pytest

from bootstrap.contract.pool_policy import Mode
from optimizer.commands.stack_file import POLICY_KEY, follow_policy
from optimizer.contract.plan import FleetPlan, NodeItem, read_plan
from optimizer.economics.policy_outlook import MOST_DEARER, RUNS, forecast_rest, play_runs, price_policies
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.simulator import NewPolicy
from tests.unit.optimizer.search.requests import answer


@cache
def plan(instance_type: str, deadline_hours: float, samples: int = 5_300_000) -> FleetPlan:
    """The best spot plan with a fallback for a type."""
    return answer(
        model="llama-3.2-1b",
        work={"samples": samples, "seq_len": 2048, "global_batch": 256},
        instance_types=[instance_type],
        deadline_hours=deadline_hours,
        max_nodes=4,
        purchase_options=["spot"],
        spot_fallback="on-demand",
    ).plans[0]


def expected(one: FleetPlan, policy: NewPolicy, deadline_hours: float | None = None) -> tuple[float, float, int]:
    """Compute the nodes' dollars and the hours of the simulation, and runs that miss the deadline."""
    hours, usd = play_runs(one, policy)
    assert len(hours) == RUNS
    late = sum(taken > (deadline_hours or 0) for taken in hours)
    beside_usd = (one.cost_usd.expected - one.cost_usd.breakdown.compute) * fmean(hours) / one.hours.expected
    return fmean(usd) - beside_usd, fmean(hours), late


# Pools that are reclaimed once an hour, once in some hours, and once in months.
@pytest.mark.parametrize("instance_type", ["p6-b200.48xlarge", "g7e.48xlarge", "g7e.2xlarge", "p5.48xlarge"])
def test_fallback_simulated_costs_what_the_closed_form_says(instance_type: str) -> None:
    # The form is of long runs: one of 3 hours that is reclaimed hourly costs up to 8% more.
    one = plan(instance_type, 1000.0, samples=8_000_000)
    compute_usd, hours, _ = expected(one, POLICIES["fallback"])
    assert compute_usd == pytest.approx(one.cost_usd.breakdown.compute, rel=0.06)
    assert hours == pytest.approx(one.hours.expected, rel=0.06)


def test_adaptive_is_cheaper_the_more_time_there_is_and_keeps_the_deadline() -> None:
    costs = []
    for deadline_hours in (16.0, 20.0, 200.0):
        one = plan("p6-b200.48xlarge", deadline_hours)
        known = one.spot_policy
        assert known is not None and known == price_policies(read_plan(one.to_json()))
        assert known.policy == "adaptive"
        # A run without any spot node stays the bound: the limits hold for it.
        assert known.cost_usd.p95 >= one.cost_usd.p95 and one.hours.p95 <= known.hours.p95 <= deadline_hours
        assert known.cost_usd.expected == known.expected_usd["adaptive"]
        assert known.expected_usd["fallback"] == one.cost_usd.expected
        costs.append(known.cost_usd.expected)
        # Only a speed beyond its own 95th percentile misses the deadline.
        assert expected(one, POLICIES["adaptive"], deadline_hours)[2] <= 0.05 * RUNS
    assert costs[2] < costs[1] < costs[0] < one.cost_usd.expected


@pytest.mark.parametrize(
    ("model", "work", "limits"),
    [
        ("gpt2-xl", {"tokens": "100k", "samples": None, "global_batch": None}, {"regions": ["eu-*"]}),
        ("vit-b-16", {"samples": 1000, "seq_len": None, "global_batch": None}, {"regions": []}),
    ],
)
def test_a_run_of_minutes_takes_time_and_costs_money_under_adaptive(
    model: str, work: dict[str, Any], limits: dict[str, Any]
) -> None:
    """The simulated difference was more than the run: recommend ended in a traceback for hours below 0."""
    limits |= {"instance_types": ["p5"], "deadline_hours": 3, "spot_fallback": "on-demand", "max_nodes": 5}
    known = [one.spot_policy for one in answer(model, work=work, **limits).plans if one.spot_policy]
    assert known and all(one.hours.p50 > 0 < min(one.expected_usd.values()) for one in known)


def test_a_rest_costs_what_the_stacks_own_policy_makes_of_the_time_that_is_left() -> None:
    one = plan("p6-b200.48xlarge", 48.0)
    adaptive = follow_policy(one.model_copy(update={"spot_policy": None}), {POLICY_KEY: "adaptive"})
    assert adaptive == one, "priced where the plan's own outlook is missing"
    fallback = follow_policy(one, {})
    hours, usd = forecast_rest(fallback, 0.5, slower=1.2)
    assert (hours.expected, usd.p95) == pytest.approx((0.6 * one.hours.expected, 0.6 * one.cost_usd.p95))
    assert one.spot_policy and forecast_rest(one, 1.0) == (one.spot_policy.hours, one.spot_policy.cost_usd)

    ample, tight, late = (forecast_rest(one, 0.5, left_hours=left) for left in (150.0, 12.0, 0.5))
    assert ample[1].expected < tight[1].expected < late[1].expected
    assert tight[0].p95 <= 12.0 and tight[0].p95 < ample[0].p95
    demand = one.node_prices_usd_per_hour[NodeItem("on-demand", one.instance_type, one.region)]
    # Without time to wait the rest is bought on demand; a run that is faster than at p95 gains time for spot.
    assert late[1].expected / late[0].expected == pytest.approx(one.node_count * demand, rel=0.1)
    # Nodes that work need no launch, and a measured speed has no error.
    working = forecast_rest(one, 0.5, left_hours=150.0, slower=1.0, mode=Mode.SPOT)
    assert working[0].expected < ample[0].expected and working[1].expected < ample[1].expected
    assert forecast_rest(one, 0.0, left_hours=1.0, mode=Mode.SPOT)[1].p95 == 0


def test_a_pool_that_is_hardly_ever_reclaimed_costs_the_same_under_both() -> None:
    known = plan("p5.48xlarge", 1000.0).spot_policy
    assert known is not None and known.policy == "adaptive"
    assert known.expected_usd["adaptive"] == pytest.approx(known.expected_usd["fallback"], rel=MOST_DEARER)


def test_a_plan_without_a_choice_has_no_policy() -> None:
    one = plan("p5.48xlarge", 1000.0)
    assert price_policies(one.model_copy(update={"job": one.job.model_copy(update={"deadline_hours": None})})) is None
    spot_only = one.purchase.model_copy(update={"fallback": "none"})
    assert price_policies(one.model_copy(update={"purchase": spot_only})) is None


@pytest.mark.parametrize(("spare_hours", "said"), [(0.1, "no time for a launch"), (0.5, "adaptive: ")])
def test_without_time_to_spare_adaptive_would_buy_on_demand_at_once(spare_hours: float, said: str) -> None:
    one = plan("p5.48xlarge", 1000.0)
    tight = one.model_copy(update={"job": one.job.model_copy(update={"deadline_hours": one.hours.p95 + spare_hours})})
    known = price_policies(tight)
    assert known is not None and known.policy == "fallback"
    assert known.cost_usd.expected == one.cost_usd.expected < known.expected_usd.get("adaptive", 1e9)
    assert said in known.describe()
