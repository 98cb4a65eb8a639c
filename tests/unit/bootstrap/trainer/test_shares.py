"""Shares of unequal ranks: the split against every other, smaller micro-batches, what does not add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from bootstrap.contract.shares import RankBatch
from bootstrap.trainer.mesh import build_mesh
from bootstrap.trainer.shares import INSTANCE_TYPE_VARIABLE, fastest_split, limited, rank_batches, with_batch
from bootstrap.training.errors import ConfigurationError
from tests.unit.bootstrap.trainer.test_config import parse

RANKS = st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(ranks=RANKS, global_batch=st.integers(1, 24))
def test_no_split_ends_earlier(ranks: list[tuple[float, int]], global_batch: int) -> None:
    pass_s, sizes = [seconds for seconds, _ in ranks], [size for _, size in ranks]

    def step_s(passes: tuple[int, ...]) -> float:
        return max(map(math.prod, zip(pass_s, passes, strict=True)))

    every = [
        passes
        for passes in itertools.product(*(range(1, global_batch // size + 1) for size in sizes))
        if sum(map(math.prod, zip(passes, sizes, strict=True))) == global_batch
    ]
    split = fastest_split(pass_s, sizes, global_batch)
    if split is None:
        assert not every
        return
    assert tuple(split) in every
    assert step_s(tuple(split)) == pytest.approx(min(map(step_s, every)), rel=1e-6)


def test_a_large_fleet_is_split_by_speed() -> None:
    """512 ranks, every eighth at half speed: 64 x 4 + 448 x 8 micro-batches are less than 4,096, with 448 x 9 more."""
    pass_s = [2.0 if rank % 8 == 0 else 1.0 for rank in range(512)]
    split = fastest_split(pass_s, [2] * 512, 8192)
    assert split is not None and sum(split) == 4096
    slow, fast = ([n for n, s in zip(split, pass_s, strict=True) if s == seconds] for seconds in (2.0, 1.0))
    assert max(fast) == 9 and max(slow) == 4


def test_shares_keep_their_samples_in_smaller_micro_batches() -> None:
    given_shares = [RankBatch(1, 6), RankBatch(4, 6, "full")]
    assert limited(given_shares, 3, in_step=False) == (RankBatch(1, 6), RankBatch(3, 8, "full"))
    assert limited([RankBatch(1, 4), RankBatch(2, 4)], 1, in_step=False) == (RankBatch(1, 4), RankBatch(1, 8))
    assert limited([RankBatch(2, 4), RankBatch(4, 4)], 2, in_step=True) == (RankBatch(1, 8), RankBatch(2, 8))
    with pytest.raises(ConfigurationError, match=r"shares \[4, 24\] have no common number.*zero1"):
        limited([RankBatch(1, 4), RankBatch(6, 4)], 3, in_step=True)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield build_mesh(parse(), world_size=1, device_type="cpu")
    dist.destroy_process_group()


def test_shares_of_an_instance_type(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTANCE_TYPE_VARIABLE, "p5.48xlarge")
    config = parse("--shares", "p4d.24xlarge=1x10,p5.48xlarge=3x8:full", global_batch=24)
    batches = rank_batches(config, mesh, micro_batch_limit=None)
    assert batches == (RankBatch(3, 8, "full"),)
    own = with_batch(config, batches, 0)
    assert (own.micro_batch, own.grad_accum, own.activation_checkpointing) == (3, 8, "full")
    # Other nodes than planned: the micro-batch stays, the number follows the global batch.
    config = parse("--shares", "p4d.24xlarge=1x10,p5.48xlarge=3x8:full", global_batch=30)
    assert rank_batches(config, mesh, micro_batch_limit=None) == (RankBatch(3, 10, "full"),)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--shares 1x2,1x3", "--shares has 2 entries, and the run 1 data ranks"),
        ("--shares p4d.24xlarge=1x2", "GPUFLEET_INSTANCE_TYPE of this node is ''"),
        ("--shares 2x2 --global-batch 5", "--shares of 1 data ranks are 4 samples, and --global-batch is 5"),
        ("--micro-batch 4 --balance measured", "a rank has one micro-batch of 4 samples: give a smaller"),
    ],
)
def test_what_does_not_add_up_is_refused(
    flags: str, reason: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INSTANCE_TYPE_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=reason):
        rank_batches(parse(*flags.split()), mesh, micro_batch_limit=None)
