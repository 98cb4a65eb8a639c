"""Synthetic samples, made on the device from their index: a run without data costs no input time and still learns."""

from __future__ import annotations

import torch

from bootstrap.trainer.data.dataset import Batch, Dataset
from bootstrap.trainer.data.images import normalise
from bootstrap.trainer.data.objectives import Objective

# Larger than any run, so that no sample repeats.
SAMPLES = 2**31
# Few tokens and few strides, so that a decoder finds the rule within some hundred steps and the loss falls visibly.
ALPHABET = 1024
STRIDES = 16
# An image is a window of one noise vector, so making it costs a copy.
NOISES = 4096


class _Synthetic(Dataset):
    def __len__(self) -> int:
        return SAMPLES


class SyntheticTokens(_Synthetic):
    """Token sequences with a constant stride: start and stride follow from the index."""

    def __init__(self, *, length: int, vocab_size: int, objective: Objective, seed: int) -> None:
        self._length = length
        self._alphabet = min(ALPHABET, vocab_size)
        self._objective = objective
        self._seed = seed

    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        """See ``Dataset.fetch``."""
        tokens = _strides(indices.to(device) + self._seed, length=self._length, alphabet=self._alphabet)
        return self._objective(tokens, indices, step)


class SyntheticImages(_Synthetic):
    """Noise images with a tint of their class."""

    def __init__(self, *, image_size: int, classes: int, seed: int) -> None:
        self._size = image_size
        self._classes = classes
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randint(0, 128, (3 * image_size**2 + NOISES,), dtype=torch.uint8, generator=generator)
        self._tints = torch.randint(0, 128, (classes, 3, 1, 1), dtype=torch.uint8, generator=generator)

    def fetch(self, indices: torch.Tensor, *, step: int, device: torch.device) -> Batch:
        """See ``Dataset.fetch``; uint8 images."""
        self._noise, self._tints = self._noise.to(device), self._tints.to(device)
        mixed = indices.to(device) * 0x9E3779B1 % 2**32
        labels, offsets = mixed % self._classes, mixed // self._classes % NOISES
        images = self._noise.unfold(0, 3 * self._size**2, 1)[offsets]
        return {"images": images.view(-1, 3, self._size, self._size) + self._tints[labels], "labels": labels}

    def finish(self, raw: Batch) -> Batch:
        """See ``Dataset.finish``."""
        return normalise(raw)


def _strides(numbers: torch.Tensor, *, length: int, alphabet: int) -> torch.Tensor:
    """Sequences (samples, length) whose start and stride follow from the sample's number."""
    mixed = numbers * 0x9E3779B1 % 2**32
    start, stride = mixed % alphabet, mixed // alphabet % STRIDES + 1
    return (start[:, None] + stride[:, None] * torch.arange(length, device=numbers.device)) % alphabet
