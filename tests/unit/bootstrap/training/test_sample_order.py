"""The sample order is a permutation, and the same for every number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.training.errors import ConfigurationError
from bootstrap.training.sample_order import SampleOrder, permute


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**32 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    image = permute(torch.arange(size), size, torch.full((size,), key))
    assert torch.equal(image.sort().values, torch.arange(size))


def test_permute_of_a_set_too_large_for_a_table() -> None:
    size = 10**12 + 39
    positions = torch.arange(size - 10_000, size)
    image = permute(positions, size, torch.full_like(positions, 5))
    assert int(image.min()) >= 0 and int(image.max()) < size and len(set(image.tolist())) == 10_000


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 10**6),
    size=st.integers(1, 10**6),
    seed=st.integers(0, 2**63),
)
def test_ranks_share_the_same_global_batch(ranks: int, step: int, size: int, seed: int) -> None:
    order = SampleOrder(dataset_size=size, global_batch=24, seed=seed)
    for shares in (None, [1] * (ranks - 1) + [25 - ranks]):
        parts = [order.indices(step, rank=rank, world_size=ranks, shares=shares) for rank in range(ranks)]
        assert [len(part) for part in parts] == (shares or [24 // ranks] * ranks)
        assert torch.equal(torch.cat(parts), order.indices(step))


def test_each_epoch_has_every_sample_once_in_another_order() -> None:
    size, batch = 1000, 48  # epochs end inside a batch
    order = SampleOrder(dataset_size=size, global_batch=batch, seed=3)
    samples = torch.cat([order.indices(step) for step in range(3 * size // batch + 1)])
    epochs = [samples[start : start + size] for start in (0, size, 2 * size)]
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, torch.arange(size))
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


def test_order_is_well_mixed() -> None:
    """Rank correlation of position and sample is that of chance: its standard deviation is 1/√(n-1)."""
    size = 4096
    for seed in range(20):
        order = SampleOrder(dataset_size=size, global_batch=size, seed=seed).indices(0).double()
        correlation = float(torch.corrcoef(torch.stack([torch.arange(size).double(), order]))[0, 1])
        assert abs(correlation) < 5 / (size - 1) ** 0.5


def test_seeds_differ_and_order_never_changes_between_versions() -> None:
    first, second = (SampleOrder(dataset_size=10_000, global_batch=8, seed=seed).indices(0).tolist() for seed in (0, 1))
    assert first != second
    # A resumed run may have another version of this code: these numbers are part of the format.
    assert first == [5497, 5061, 1055, 2591, 5700, 8880, 7104, 4234]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="10 does not divide over 4 ranks"):
        SampleOrder(dataset_size=100, global_batch=10, seed=0).indices(0, world_size=4)
    with pytest.raises(ConfigurationError, match="at least 1"):
        SampleOrder(dataset_size=0, global_batch=10, seed=0)
    with pytest.raises(ConfigurationError, match=r"shares are \[5, 4\], 9 samples of 2 ranks.* 10 in all"):
        SampleOrder(dataset_size=100, global_batch=10, seed=0).indices(0, world_size=2, shares=[5, 4])
    with pytest.raises(ConfigurationError, match="expected at least 1 of each of 3 data ranks, 6 in all"):
        SampleOrder(dataset_size=9, global_batch=6, seed=0).indices(0, world_size=3, shares=[6, 0, 0])
