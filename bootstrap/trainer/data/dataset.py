"""Contract of a data set: samples by index, as model inputs.

A batch is a function of the indices, the step and the seed alone, so a resumed run sees what an undisturbed one would
have seen, at any number of ranks. ``fetch`` runs in the background; ``finish`` runs in the step, on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.utils.data

Batch = dict[str, torch.Tensor]
# A step, and the samples of one of its micro-batches.
Work = tuple[int, torch.Tensor]


class Dataset(torch.utils.data.Dataset[Batch], ABC):
    """Map-style data set whose samples are fetched a batch at a time.

    A decoder's batch: ``input_ids`` and ``labels``, int64 (samples, seq_len); ``labels`` is shifted already: the label
    at a position is the next token. An encoder's: the same keys, ``labels`` -100 outside the masked positions. A CNN's:
    ``images`` float32 (samples, 3, size, size) in channels_last and ``labels`` int64 (samples,); so an image encoder.
    """

    # Worker processes are worth their start only where a sample costs milliseconds of CPU.
    needs_workers: ClassVar[bool] = False
    # Digest of the samples and their order, the same wherever they lie.
    digest: str = "synthetic"

    @abstractmethod
    def __len__(self) -> int:
        """Samples of one epoch."""

    def __getitem__(self, work: Work) -> Batch:
        """Raw batch, as torch's DataLoader has its worker processes make it."""
        return self.fetch(work[1], step=work[0], device=torch.device("cpu"))

    @abstractmethod
    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        """Raw batch of int64 ``indices``; on ``device`` where it is made there, else on the CPU."""

    def finish(self, raw: Batch) -> Batch:
        """Model inputs of a raw batch on its device."""
        return raw

    def batch(self, indices: torch.Tensor, device: torch.device, *, step: int = 0) -> Batch:
        """Model inputs of ``indices``, without a loader."""
        raw = self.fetch(indices, step=step, device=device)
        return self.finish({name: tensor.to(device) for name, tensor in raw.items()})


def hash64(values: Iterable[int]) -> int:
    """63-bit hash of integers (splitmix64's finalizer, https://prng.di.unimi.it/splitmix64.c, public domain)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
