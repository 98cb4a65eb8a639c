"""The time nodes may take to save and end, of a plan and in the search."""

from __future__ import annotations

import pytest

from bootstrap.contract.timings import HOOK_LIMIT_S, LEAVING_S, SAVE_GIB_PER_S
from optimizer.economics.running_costs import reserve_hours
from tests.plans import sample_plan

DDP = {"sharding": "ddp"}


def test_a_large_checkpoint_gets_the_time_its_upload_takes() -> None:
    plan = sample_plan(job={"checkpoint_gib": 782.0}, step_time_s=7.2)
    # 782 GiB over two nodes of 0.396 GiB/s, and two steps.
    assert plan.save_limit_s == pytest.approx(782 / (2 * SAVE_GIB_PER_S) + 14.4, abs=1)
    assert plan.terminate_timeout_s == plan.save_limit_s + LEAVING_S


def test_a_state_that_every_rank_holds_is_written_by_one_node() -> None:
    job = {"checkpoint_gib": 782.0}
    alone = sample_plan(job=job, parallelism=DDP).save_limit_s
    assert alone - 14.4 == pytest.approx(2 * (sample_plan(job=job).save_limit_s - 14.4), abs=2)


@pytest.mark.parametrize(("checkpoint_gib", "limit"), [(0.0, 240), (75.3, 240), (1e6, HOOK_LIMIT_S - LEAVING_S)])
def test_the_time_to_save_is_bounded(checkpoint_gib: float, limit: int) -> None:
    """Minutes even for a small model, and never more than AWS lets a hook wait."""
    plan = sample_plan(job={"checkpoint_gib": checkpoint_gib})
    assert plan.save_limit_s == limit
    assert 30 <= plan.terminate_timeout_s <= HOOK_LIMIT_S


@pytest.mark.parametrize("checkpoint_gib", [1.0, 500.0, 2000.0])
@pytest.mark.parametrize(("parallelism", "writers"), [(DDP, 1), ({}, 2)])
def test_the_search_and_its_plan_reserve_the_same_time(
    checkpoint_gib: float, parallelism: dict[str, str], writers: int
) -> None:
    plan = sample_plan(job={"checkpoint_gib": checkpoint_gib}, parallelism=parallelism)
    assert reserve_hours(plan.step_time_s, checkpoint_gib, writers) == plan.reserve_s / 3600


def test_the_reserve_pays_all_nodes_at_the_dearest_price_they_may_have() -> None:
    # One spot node of 10 USD/h and one on demand of 21.96; 5 USD besides over 4.5 h; the 5 minutes of the hook and 4.
    minutes, besides = 9 / 60, 5 / 4.5
    assert sample_plan().reserve_usd == pytest.approx((10 + 21.96 + besides) * minutes)
    fallback = sample_plan(purchase={"on_demand_base": 0, "fallback": "on-demand"})
    assert fallback.reserve_usd == pytest.approx((2 * 21.96 + besides) * minutes)
