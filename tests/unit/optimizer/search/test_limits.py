"""Limits are kept at the 95th percentile, and a type without a plan names the constraint that binds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.contract.errors import InvalidInputError
from optimizer.recommend import Recommendation, recommend
from optimizer.search.problem import Rejection
from tests.unit.optimizer.search.requests import TYPES, answer

ONE_P4D = {"instance_types": ["p4d"], "regions": ["us-east-1"], "max_nodes": 1}


def rejection(answered: Recommendation, name: str) -> Rejection:
    (entry,) = [entry for entry in answered.rejected if entry.instance_type == name]
    return entry


def bindings(answered: Recommendation) -> dict[str, str]:
    return {entry.instance_type: entry.binding_constraint for entry in answered.rejected}


@settings(max_examples=25, deadline=None)
@given(budget=st.floats(1, 3000), deadline=st.floats(1, 200))
def test_limits_are_kept_at_the_95th_percentile(budget: float, deadline: float) -> None:
    answered = answer(budget_usd=budget, deadline_hours=deadline)
    for plan in answered.plans + answered.pareto:
        assert plan.cost_usd.p95 + plan.reserve_usd <= budget + 0.02
        assert plan.hours.p95 <= deadline * 1.00001
    for entry in answered.rejected:
        if entry.binding_constraint in ("budget", "deadline"):
            assert entry.value > entry.limit
    # Every considered type is either in a plan or rejected, never lost.
    planned = {plan.instance_type for plan in answered.plans}
    assert bindings(answered).keys() | planned == set(TYPES)
    assert not bindings(answered).keys() & planned


def test_the_candidates_have_each_fleet_once_with_the_limits_that_exclude_it() -> None:
    answered = answer(budget_usd=60, deadline_hours=3)
    columns = answered.candidates
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    fleets = {(row["instance_type"], row["node_count"], row["purchase_option"]): row for row in rows}
    assert len(fleets) == len(rows)
    for plan in answered.plans + answered.pareto:
        row = fleets[plan.instance_type, plan.node_count, plan.purchase.option]
        assert row["excluded_by"] == ""
        assert row["cost_usd_expected"] <= plan.cost_usd.expected * 1.001 + 0.01  # cents
    assert {row["excluded_by"] for row in rows} == {"", "budget", "deadline", "deadline,budget"}
    for row in rows:
        excluded = row["excluded_by"].split(",")
        assert ("deadline" in excluded) == (row["hours_p95"] > 3)
        assert "budget" in excluded or row["cost_usd_p95"] < 60


@pytest.mark.parametrize("option", ["on-demand", "spot", "reserved"])
def test_the_plan_keeps_the_budget_that_the_search_asked_for(option: str) -> None:
    """preflight asks the plan: it must not refuse a plan that the search found within the budget."""
    limits: dict[str, Any] = {**ONE_P4D, "purchase_options": [option], "max_nodes": 2}
    needed = rejection(answer(**limits, budget_usd=1.0), "p4d.24xlarge").value
    plan = answer(**limits, budget_usd=needed + 0.01).plans[0]
    assert plan.cost_usd.p95 + plan.reserve_usd == pytest.approx(needed, abs=0.03)


def test_a_rejection_keeps_the_other_limit_too_or_says_that_nothing_does() -> None:
    """The value was of a run that the other limit refused, so whoever allowed it was refused again."""
    limits: dict[str, Any] = {"instance_types": ["p4d"], "purchase_options": ["on-demand"]}
    usd, hours = zip(*((p.cost_usd.p95, p.hours.p95) for p in answer(objective="pareto", **limits).pareto), strict=True)
    limits |= {"budget_usd": 0.9 * min(usd), "deadline_hours": 0.99 * max(hours)}
    why = rejection(answer(**limits), "p4d.24xlarge")
    assert "at the 95th percentile, with its drain, the budget is" in why.reason and "deadline" not in why.reason
    assert answer(**limits | {"budget_usd": why.value + 0.01}).plans
    both = rejection(answer(**limits | {"deadline_hours": 0.9 * min(hours)}), "p4d.24xlarge")
    assert both.binding_constraint == "budget" and f"the deadline is {0.9 * min(hours):,.1f} h" in both.reason
    limits |= {"budget_usd": 1.2 * min(usd), "deadline_hours": 0.9 * min(hours)}
    late = rejection(answer(**limits), "p4d.24xlarge")
    assert late.binding_constraint == "deadline" and answer(**limits | {"deadline_hours": late.value + 0.01}).plans


def test_each_binding_constraint_is_named() -> None:
    types = ["g6f", "p3", "p5e", "p4de", "p5.4xlarge"]
    named = bindings(
        answer(
            "llama-3.1-70b", work={"seq_len": 8192}, instance_types=types, max_nodes=1, purchase_options=["on-demand"]
        )
    )
    assert named["g6f.xlarge"] == "memory"
    assert named["p3.16xlarge"] == "precision"  # V100 has no bf16
    assert named["p5.4xlarge"] == "memory"
    assert named["p5e.48xlarge"] in ("region", "price")


def test_a_lone_gpu_has_nothing_to_shard() -> None:
    why = rejection(answer(instance_types=["g5.xlarge"], max_nodes=1, sharding=["zero3"]), "g5.xlarge")
    assert (why.binding_constraint, why.limit) == ("sharding", "ddp")


def test_a_framework_without_the_sharding_is_named() -> None:
    with pytest.raises(InvalidInputError, match="megatron has ddp, zero1"):
        answer(work={"framework": "megatron"}, sharding=["zero3"])


def test_without_a_plan_the_nearest_for_each_limit_is_named() -> None:
    limits: dict[str, Any] = {"instance_types": ["p4d", "g5.12xlarge"], "purchase_options": ["on-demand"]}
    free = answer(**limits)
    budget, deadline = 0.8 * min(plan.cost_usd.p95 for plan in free.pareto), min(plan.hours.p95 for plan in free.pareto)
    answered = answer(**limits, budget_usd=budget, deadline_hours=1.2 * deadline)
    assert not answered.plans
    moved = [plan for plan in answered.nearest if plan.distance is not None]
    by_changes = {tuple(plan.changes): plan for plan in moved}
    dearer, slower = by_changes["budget_usd",], by_changes["budget_usd", "deadline_hours"]
    assert [plan.distance for plan in moved] == sorted(plan.distance or 0 for plan in moved)
    assert slower.plan.cost_usd.p95 < dearer.plan.cost_usd.p95 and slower.plan.hours.p95 > dearer.plan.hours.p95
    for plan in answered.nearest:
        with_changes = limits | {"budget_usd": budget, "deadline_hours": 1.2 * deadline} | dict(plan.changes)
        assert answer(**with_changes).plans[0].cost_usd == plan.plan.cost_usd
    short = limits | {"budget_usd": dearer.changes["budget_usd"] - 0.02, "deadline_hours": 1.2 * deadline}
    assert not answer(**short).plans
    spot = next(plan for plan in answer(**short).nearest if "purchase_options" in plan.changes)
    assert (spot.plan.purchase.option, spot.distance) == ("spot", None)


def test_an_opened_list_comes_before_a_limit_that_more_than_doubles() -> None:
    """A year's commitment of 122,000 USD was the advice to whoever has 3,000 for two days."""
    answered = answer("llama-3.1-8b", purchase_options=["reserved"], budget_usd=3000, deadline_hours=48)
    first, *others = answered.nearest
    assert tuple(first.changes) == ("purchase_options",) and all((one.distance or 0) > 1 for one in others)


def test_a_model_too_large_for_the_types_and_nodes_is_told_which_have_room() -> None:
    work = {"seq_len": 8192, "samples": 10_000}
    answered = answer("llama-3.1-8b", work=work, instance_types=["g5.12xlarge"], max_nodes=1, budget_usd=1)
    changed = {tuple(plan.changes): plan for plan in answered.nearest}
    assert changed.keys() == {("max_nodes", "budget_usd"), ("instance_types", "budget_usd")}
    more = changed["max_nodes", "budget_usd"]
    assert more.plan.node_count == more.changes["max_nodes"] > 1


def test_fp16_is_named_where_no_considered_gpu_computes_in_bf16() -> None:
    work = {"samples": 100_000, "seq_len": None, "global_batch": 64}
    answered = answer("resnet18", work=work, instance_types=["g4dn.xlarge"], max_nodes=1)
    assert bindings(answered) == {"g4dn.xlarge": "precision"} and not answered.plans
    (half,) = (plan for plan in answered.nearest if "precision" in plan.changes)
    assert half.flags == {"precision": ["--precision", "fp16"]} and half.plan.job.precision == "fp16"
    (found, *_) = answer("resnet18", work={**work, **half.changes}, instance_types=["g4dn.xlarge"], max_nodes=1).plans
    assert found.cost_usd == half.plan.cost_usd
    assert answer(work={"precision": "fp8"}, instance_types=["p4d"]).nearest[0].changes == {"precision": "bf16"}
    # QLoRA computes in bf16 alone: the answer was an error about a precision that nobody gave.
    qlora = recommend(
        {
            "model": "llama-3.1-8b",
            "workload": {"tokens": "300M", "seq_len": 2048, "method": "qlora"},
            "constraints": {"instance_types": ["g4dn"]},
        }
    )
    assert set(bindings(qlora).values()) == {"precision"}
    assert [[*plan.changes] for plan in qlora.nearest] == [["instance_types"]]
    # Another type of the request has bf16: the budget binds there, and fp16 is no way out.
    both = answer("resnet18", work=work, instance_types=["g4dn.xlarge", "g5.xlarge"], max_nodes=1, budget_usd=0.01)
    assert both.nearest and not any("precision" in plan.changes for plan in both.nearest)


def test_a_type_that_needs_an_image_of_the_users_own_says_so() -> None:
    """Preview refuses such a plan until the image is given, and the answer did not say it."""
    notes = answer(work={"precision": "fp16", "global_batch": 32}, instance_types=["p3"], max_nodes=1).notes
    assert any("has V100 GPUs" in note and "gpufleet:amiId" in note for note in notes)


def test_a_gpu_that_no_named_type_has_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no type of instance_types p4d has a GPU of H100"):
        answer(instance_types=["p4d"], gpus=["H100"])
