"""Micro-batches of unequal ranks: the split against every other, what cannot be balanced."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.trainer.loop import fastest_split
from bootstrap.trainer.mesh import with_batches
from bootstrap.training.errors import ConfigurationError
from tests.unit.bootstrap.trainer.test_config import parse


@settings(max_examples=100, deadline=None)
@given(pass_s=st.lists(st.floats(0.01, 1), min_size=1, max_size=4), more=st.integers(0, 8))
def test_no_split_ends_earlier(pass_s: list[float], more: int) -> None:
    def step_s(passes: tuple[int, ...]) -> float:
        return max(map(math.prod, zip(pass_s, passes, strict=True)))

    total = len(pass_s) + more
    every = [split for split in itertools.product(range(1, more + 2), repeat=len(pass_s)) if sum(split) == total]
    split = tuple(fastest_split(pass_s, total))
    assert split in every
    assert step_s(split) == pytest.approx(min(map(step_s, every)))


def test_a_rank_with_one_micro_batch_has_nothing_to_balance() -> None:
    config = parse("--micro-batch", "4", "--balance", "measured", global_batch=8)
    with pytest.raises(ConfigurationError, match="a rank has one micro-batch of 4 samples: give a smaller"):
        with_batches(config, 2, micro_batch_limit=None)
    assert with_batches(config, 2, micro_batch_limit=2).grad_accum == 2
