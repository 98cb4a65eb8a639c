"""Masks (BERT, arXiv:1810.04805, 3.1) and corrupted spans (T5, arXiv:1910.10683, 3.1.4) of a sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bootstrap.contract.trainer import spans_of
from bootstrap.trainer.data.dataset import Batch, hash64
from bootstrap.trainer.loss import IGNORED

Ints = npt.NDArray[np.int64]

# First sentinel of the published tokenizers, by vocab_size, which rounds up their length: T5's 32,100, mT5's 250,100.
# Others' sentinels are the last tokens of the vocabulary. A tokenizer has 100 of them.
FIRST_SENTINEL = {32128: 32099, 250112: 250099}
SENTINELS = 100


@dataclass(frozen=True, kw_only=True)
class MaskedTokens:
    """Masking by (seed, step, sample): 15% of the positions are predicted; 80% of them masked, 10% random, 10% kept."""

    mask_token_id: int
    vocab_size: int
    seed: int
    share: float = 0.15

    def apply(self, tokens: torch.Tensor, indices: torch.Tensor, *, step: int) -> Batch:
        """Inputs and labels of int64 ``tokens`` (samples, seq_len), drawn on the tokens' device."""
        draws = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
        other = torch.empty_like(tokens)
        generator = torch.Generator(tokens.device)
        for row, index in enumerate(indices.tolist()):
            generator.manual_seed(hash64((self.seed, step, index)))
            draws[row].uniform_(generator=generator)
            other[row].random_(self.vocab_size, generator=generator)
        predicted = draws < self.share
        inputs = tokens.masked_fill(draws < 0.8 * self.share, self.mask_token_id)
        inputs = torch.where(predicted & (draws >= 0.9 * self.share), other, inputs)
        return {"input_ids": inputs, "labels": tokens.masked_fill(~predicted, IGNORED)}


@dataclass(frozen=True, kw_only=True)
class CorruptedSpans:
    """Spans by (seed, step, sample): 15% of the tokens, three a span on average, are in the targets behind sentinels.

    Attributes:
        start, end: token that the decoder reads first, and token that ends inputs and targets.
    """

    vocab_size: int
    start: int
    end: int
    seed: int

    def apply(self, tokens: torch.Tensor, indices: torch.Tensor, *, step: int) -> Batch:
        """Inputs, decoder inputs and labels of int64 ``tokens`` (samples, length), as long for every sample."""
        inputs, labels = [], []
        for row, index in zip(tokens.numpy(), indices.tolist(), strict=True):
            noise = _noise(len(row), np.random.default_rng(hash64((self.seed, step, index))))
            inputs.append(self._with_sentinels(row, noise))
            labels.append(self._with_sentinels(row, ~noise))
        targets = torch.from_numpy(np.stack(labels))
        first = torch.full_like(targets[:, :1], self.start)
        return {
            "input_ids": torch.from_numpy(np.stack(inputs)),
            "decoder_input_ids": torch.cat([first, targets[:, :-1]], 1),
            "labels": targets,
        }

    def _with_sentinels(self, row: Ints, left_out: npt.NDArray[np.bool_]) -> Ints:
        """Tokens of ``row`` with one sentinel for each run that is left out, and the end."""
        begins = left_out & ~np.concatenate(([False], left_out[:-1]))
        sentinel = FIRST_SENTINEL.get(self.vocab_size, self.vocab_size - 1) + 1 - np.cumsum(begins)
        kept = np.where(begins, sentinel, row)[~left_out | begins]
        return np.append(kept, self.end)


def _noise(length: int, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Flags of the tokens in spans; the first token is in none, and the last in one."""
    noise, spans = spans_of(length)
    lengths = np.stack([_parts(length - noise, spans, generator), _parts(noise, spans, generator)], 1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths.ravel())


def _parts(total: int, count: int, generator: np.random.Generator) -> Ints:
    """Random lengths above 0, ``count`` of them, that add up to ``total``."""
    cuts = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))
