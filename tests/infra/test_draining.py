from __future__ import annotations

import pytest

from infra.draining import HOOK_LIMIT_S, LEAVING_S, SAVE_GIB_PER_S, save_limit_s, terminate_timeout_s
from tests.plans import sample_plan


def test_a_large_checkpoint_gets_the_time_its_upload_takes() -> None:
    plan = sample_plan(job={"checkpoint_gib": 782.0}, step_time_s=7.2)
    # 782 GiB over two nodes of 0.396 GiB/s, and two steps.
    assert save_limit_s(plan) == pytest.approx(782 / (2 * SAVE_GIB_PER_S) + 14.4, abs=1)
    assert terminate_timeout_s(plan) == save_limit_s(plan) + LEAVING_S


def test_a_state_that_every_rank_holds_is_written_by_one_node() -> None:
    job = {"checkpoint_gib": 782.0}
    alone = save_limit_s(sample_plan(job=job, parallelism={"sharding": "ddp"}))
    assert alone - 14.4 == pytest.approx(2 * (save_limit_s(sample_plan(job=job)) - 14.4), abs=2)


@pytest.mark.parametrize(("checkpoint_gib", "limit"), [(0.0, 240), (75.3, 240), (1e6, HOOK_LIMIT_S - LEAVING_S)])
def test_the_time_to_save_is_bounded(checkpoint_gib: float, limit: int) -> None:
    """Minutes even for a small model, and never more than AWS lets a hook wait."""
    plan = sample_plan(job={"checkpoint_gib": checkpoint_gib})
    assert save_limit_s(plan) == limit
    assert 30 <= terminate_timeout_s(plan) <= HOOK_LIMIT_S
