"""The FleetPlan contract: what is read, and what nonsense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.contract.plan import (
    MARKET_LABELS,
    Market,
    NodeItem,
    PlanError,
    plan_from_dict,
    read_plan,
    read_plan_text,
)
from tests.plans import LLAMA, ON_DEMAND_P4D, SPOT_P4D, SPOT_P4DE, merged, sample_plan

NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "more ranks than GPUs": ({"parallelism": {"data": 32}}, "2 nodes of 8 GPUs have 16"),
    "more nodes than ranks": ({"node_count": 3}, "3 nodes of 8 GPUs have 24"),
    "batch does not multiply": ({"parallelism": {"micro_batch": 5}}, "global_batch 128"),
    "negative price": ({"prices": [merged(SPOT_P4D["prices"][0], {"usd": -1})]}, "prices.0.usd"),
    "unknown key": ({"discount": 0.5}, "discount"),
    "no nodes": ({"node_count": 0}, "node_count"),
    "region is a path": ({"region": "../etc"}, "region"),
    "type is a command": ({"instance_type": "$(rm -rf /)"}, "instance_type"),
    "zone is a name": ({"zone_ids": ["us-east-1a"]}, "zone_ids.0"),
    "future schema": ({"schema_version": 2}, "schema_version"),
    "infinite cost": ({"cost_usd": {"p95": float("inf")}}, "cost_usd.p95"),
}


def test_sample_round_trips() -> None:
    plan = sample_plan()
    assert read_plan(plan.to_json()) == plan


def test_the_plan_of_a_stack_of_before_is_read_so_that_its_nodes_can_be_ended() -> None:
    spread = {"expected": 1.0, "p50": 1.0, "p95": 2.0}
    outlook = {"policy": "adaptive", "hours": spread, "cost_usd": spread, "expected_usd": {}, "source": ""}
    prices = {"age_days": 9, "limit_days": 7, "zones": 1, "cost_usd_dearest": 2.0}
    now = SPOT_P4D | {"spot_policy": outlook, "spot_range": prices}
    before = SPOT_P4D | {
        "spot_policy": outlook | {"on_demand_share": 0.1},
        "spot_range": prices | {"cheapest_usd_per_hour": 1.0, "dearest_usd_per_hour": 2.0},
        "purchase": SPOT_P4D["purchase"] | {"spot_types": []},
        "digest": "0123456789abcdef",
    }
    assert plan_from_dict(before, is_deployed=True).model_copy(update={"digest": ""}) == plan_from_dict(now)
    with pytest.raises(PlanError, match="was changed since recommend"):
        plan_from_dict(before)


def test_alternates_round_trip() -> None:
    assert "alternates" not in json.loads(sample_plan().to_json())  # plans of before hash alike
    plan = sample_plan(alternates=[ON_DEMAND_P4D, SPOT_P4DE])
    assert read_plan(plan.to_json()) == plan


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_with_its_place(name: str) -> None:
    changes, message = NONSENSE[name]
    with pytest.raises(PlanError) as caught:
        plan_from_dict(merged(SPOT_P4D, changes), origin="plan.json")
    assert message in str(caught.value)
    assert "plan.json" in str(caught.value)


def test_a_plan_is_picked_from_recommend_output(tmp_path: Path) -> None:
    second = merged(SPOT_P4D, {"region": "us-west-2", "zone_ids": []})
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"schema_version": 1, "plans": [SPOT_P4D, second]}))
    text = read_plan_text(file)
    assert read_plan(text).region == "us-east-1"
    assert read_plan(text, plan_number=2).region == "us-west-2"
    with pytest.raises(PlanError, match="holds 2 plans, there is no plan 3"):
        read_plan(text, plan_number=3)
    with pytest.raises(PlanError, match="no plan 2"):
        read_plan(sample_plan().to_json(), plan_number=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"node_count": ' + 5000 * "9" + "}", "not JSON"),
        ("[]", "list"),
        ('{"plans": []}', "without plans"),
        ('{"plans": 5}', "without plans"),
        ("{}", "instance_type"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(text)


def test_a_byte_order_mark_is_no_defect(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("\ufeff" + sample_plan().to_json(), encoding="utf-8")
    assert read_plan(read_plan_text(file)) == sample_plan()
    assert read_plan("\ufeff" + sample_plan().to_json()) == sample_plan()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.json"):
        read_plan_text(tmp_path / "absent.json")


def test_a_fraction_of_a_gpu_is_one_rank() -> None:
    plan = sample_plan(
        node_count=1,
        node={"gpu_count": 0.125},
        parallelism={"data": 1, "micro_batch": 64},
        purchase={"on_demand_base": 0},
    )
    assert plan.gpus == 1


PRICE = {"usd": 1.0, "per": "hour", "source": "list", "as_of": "2026-11-01"}


@pytest.mark.parametrize("market", MARKET_LABELS)
def test_the_text_of_a_node_s_price_is_read_back(market: Market) -> None:
    node = NodeItem(market, "p5.48xlarge", "us-east-1")
    assert sample_plan(prices=[PRICE | {"item": str(node)}]).prices[0].node == node


@pytest.mark.parametrize("item", ["gp3-storage us-east-1", "kms-key us-east-1", "spot", "Spot p5.48xlarge us-east-1"])
def test_other_texts_name_no_node(item: str) -> None:
    assert sample_plan(prices=[PRICE | {"item": item}]).prices[0].node is None


def test_an_older_plan_keeps_its_json_and_is_for_code_of_the_users_own() -> None:
    """Fields that came later are left out at their defaults: a run's id is a digest of the job."""
    plan = sample_plan()
    assert plan.model_dump(mode="json")["job"] == SPOT_P4D["job"]
    assert len(plan.beyond_trainer) == 1


def test_a_plan_says_what_the_trainer_lacks() -> None:
    plan = sample_plan(job={"architecture": LLAMA})
    assert plan.beyond_trainer == ()
    assert read_plan(plan.to_json()).job.architecture == LLAMA
    stages = {"data": 8, "pipeline": 2, "grad_accum": 4}
    staged = sample_plan(job={"architecture": LLAMA, "framework": "megatron"}, parallelism=stages)
    assert [reason.split()[0] for reason in staged.beyond_trainer] == ["framework", "pipeline"]
