"""Which samples a step trains on: a pure function of the seed and the global sample index.

Sample ``g`` of the run (``step * global_batch`` and on) is position ``g % dataset_size`` of epoch
``g // dataset_size``, and each epoch is its own permutation of the data set. Nothing is stored but the step, so the
order is the same after any restart and on any number of ranks, as long as the global batch stays.
"""

from __future__ import annotations

import torch

from bootstrap.training.errors import ConfigurationError

_LOW_32 = 0xFFFFFFFF
_ROUNDS = 6


def _mix(value: torch.Tensor) -> torch.Tensor:
    """32-bit integer hash, element by element ("lowbias32", https://nullprogram.com/blog/2018/07/31/, public domain).

    The product of two 32-bit values may wrap in int64; its low 32 bits are right all the same.
    """
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _LOW_32
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _LOW_32
    return value ^ (value >> 16)


def permute(positions: torch.Tensor, size: int, key: torch.Tensor) -> torch.Tensor:
    """Image of each position under a keyed permutation of ``range(size)``, without storing the permutation.

    A Feistel network over the smallest even number of bits that covers ``size``, walked until it lands inside
    (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).

    Args:
        positions: int64 of any shape, each in ``range(size)``.
        size: number of samples, 1 to 2**62.
        key: int64 of one shape with ``positions``; low 32 bits are used.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    result = positions.clone()
    outside = torch.ones_like(result, dtype=torch.bool)
    while bool(outside.any()):
        left, right = result[outside] >> half, result[outside] & mask
        for round_number in range(_ROUNDS):
            round_key = _mix((key[outside] + round_number * 0x9E3779B9) & _LOW_32)
            left, right = right, left ^ (_mix((right ^ round_key) & _LOW_32) & mask)
        result[outside] = (left << half) | right
        outside = result >= size
    return result


def sample_indices(
    step: int,
    *,
    dataset_size: int,
    global_batch: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
) -> torch.Tensor:
    """Data set indices that ``rank`` trains on in ``step``.

    Args:
        step: optimizer step, from 0.
        dataset_size: samples of one epoch.
        global_batch: samples of one step over all ranks; ranks take equal, consecutive parts.
        seed: of the order; the same for the whole run.
        rank: of ``world_size``.
        world_size: number of ranks.
        shuffle: False for the data set's own order.

    Returns:
        int64 of shape ``(global_batch // world_size,)``.

    Raises:
        ConfigurationError: the global batch does not divide evenly, or a size is not positive.
    """
    if dataset_size < 1 or global_batch < 1:
        raise ConfigurationError(f"dataset_size {dataset_size} and global_batch {global_batch} must be at least 1")
    if global_batch % world_size:
        raise ConfigurationError(
            f"global_batch {global_batch} does not divide over {world_size} ranks: every rank takes the same share so "
            "that the gradient's mean is the batch's mean; choose a multiple of every world size the run may have"
        )
    share = global_batch // world_size
    first = step * global_batch + rank * share
    index = torch.arange(first, first + share, dtype=torch.int64)
    position, epoch = index % dataset_size, index // dataset_size
    if not shuffle:
        return position
    key = _mix((_mix(torch.full_like(epoch, seed & _LOW_32)) + epoch) & _LOW_32)
    return permute(position, dataset_size, key)
