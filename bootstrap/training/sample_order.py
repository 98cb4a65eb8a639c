"""Order of the samples, part of the checkpoint format: a function of the seed and the sample's number in the run.

Each epoch has its own permutation; restarts and the number of ranks do not change the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bootstrap.training.errors import ConfigurationError

_LOW_32 = 0xFFFFFFFF
_ROUNDS = 6


def _hash32(value: torch.Tensor) -> torch.Tensor:
    """Hash "lowbias32", https://nullprogram.com/blog/2018/07/31/ (public domain); int64 products may wrap."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _LOW_32
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _LOW_32
    return value ^ (value >> 16)


def permute(positions: torch.Tensor, size: int, key: torch.Tensor) -> torch.Tensor:
    """Image of int64 positions under a keyed permutation of ``range(size)``, ``size`` 1 to 2**62, without a table.

    A Feistel network over the smallest even number of bits that covers ``size``, repeated until the image lies inside
    (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). ``key``: low 32 bits, same shape.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    image = positions.clone()
    outside = torch.ones_like(image, dtype=torch.bool)
    while bool(outside.any()):
        left, right = image[outside] >> half, image[outside] & mask
        for round_number in range(_ROUNDS):
            round_key = _hash32((key[outside] + round_number * 0x9E3779B9) & _LOW_32)
            left, right = right, left ^ (_hash32((right ^ round_key) & _LOW_32) & mask)
        image[outside] = (left << half) | right
        outside = image >= size
    return image


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Samples of each step; constant for a run. Ranks take consecutive parts of the global batch, in order of rank."""

    dataset_size: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.dataset_size < 1 or self.global_batch < 1:
            raise ConfigurationError(
                f"dataset_size {self.dataset_size} and global_batch {self.global_batch} must be at least 1"
            )

    def indices(
        self, step: int, *, rank: int = 0, world_size: int = 1, shares: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Data set indices that ``rank`` trains on in ``step``: int64 of shape ``(share,)``.

        ``shares``: samples of each rank; default: ``global_batch / world_size``. They change who takes a sample, never
        the step that takes it.
        """
        if shares is None:
            if self.global_batch % world_size:
                raise ConfigurationError(
                    f"global_batch {self.global_batch} does not divide over {world_size} ranks: choose a multiple of "
                    "every world size that the run may have, or give shares"
                )
            shares = [self.global_batch // world_size] * world_size
        if len(shares) != world_size or sum(shares) != self.global_batch or min(shares) < 1:
            raise ConfigurationError(
                f"shares are {list(shares)}, {sum(shares)} samples of {len(shares)} ranks; expected at least 1 of each "
                f"of {world_size} data ranks, {self.global_batch} in all"
            )
        first = step * self.global_batch + sum(shares[:rank])
        sample = torch.arange(first, first + shares[rank], dtype=torch.int64)
        position, epoch = sample % self.dataset_size, sample // self.dataset_size
        key = _hash32((_hash32(torch.full_like(epoch, self.seed & _LOW_32)) + epoch) & _LOW_32)
        return permute(position, self.dataset_size, key)
