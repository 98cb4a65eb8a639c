"""Objectives: model inputs and labels of int64 tokens (samples, length), on the tokens' device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from bootstrap.contract.trainer import spans_of
from bootstrap.trainer.data.dataset import Batch, hash64
from bootstrap.trainer.loss import IGNORED

Ints = npt.NDArray[np.int64]
# A function of tokens, the samples' indices and the step.
Objective = Callable[[torch.Tensor, torch.Tensor, int], Batch]

# First sentinel of the published tokenizers, by vocab_size, which rounds up their length: T5's 32,100, mT5's 250,100.
# Others' sentinels are the last tokens of the vocabulary. A tokenizer has 100 of them.
FIRST_SENTINEL = {32128: 32099, 250112: 250099}
SENTINELS = 100
# Share of the positions that a masked model predicts (BERT, arXiv:1810.04805, 3.1).
MASKED_SHARE = 0.15


def predict_next(tokens: torch.Tensor, _: torch.Tensor, __: int) -> Batch:
    """Label each token of a decoder with the next one."""
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def continue_text(tokens: torch.Tensor, _: torch.Tensor, __: int, *, seq_len: int, start: int) -> Batch:
    """Have the decoder go on where the encoder's ``seq_len`` tokens end."""
    return {"input_ids": tokens[:, :seq_len], **targets(tokens[:, seq_len:], start)}


def targets(tokens: torch.Tensor, start: int) -> Batch:
    """Labels, and the decoder's input: the label before each, behind the start token."""
    first = torch.full_like(tokens[:, :1], start)
    return {"decoder_input_ids": torch.cat([first, tokens[:, :-1]], 1), "labels": tokens.contiguous()}


def mask_tokens(
    tokens: torch.Tensor, indices: torch.Tensor, step: int, *, mask_token_id: int, vocab_size: int, seed: int
) -> Batch:
    """Predict positions drawn by (seed, step, sample): 80% of them are masked, 10% random, 10% kept."""
    draws = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    other = torch.empty_like(tokens)
    generator = torch.Generator(tokens.device)
    for row, index in enumerate(indices.tolist()):
        generator.manual_seed(hash64((seed, step, index)))
        draws[row].uniform_(generator=generator)
        other[row].random_(vocab_size, generator=generator)
    predicted = draws < MASKED_SHARE
    inputs = tokens.masked_fill(draws < 0.8 * MASKED_SHARE, mask_token_id)
    inputs = torch.where(predicted & (draws >= 0.9 * MASKED_SHARE), other, inputs)
    return {"input_ids": inputs, "labels": tokens.masked_fill(~predicted, IGNORED)}


def corrupt_spans(
    tokens: torch.Tensor, indices: torch.Tensor, step: int, *, vocab_size: int, start: int, end: int, seed: int
) -> Batch:
    """Move spans drawn by (seed, step, sample) to the targets, behind sentinels (T5, arXiv:1910.10683, 3.1.4).

    15% of the tokens are in spans, three a span on average; ``end`` ends inputs and targets. All samples are as long.
    """
    first = FIRST_SENTINEL.get(vocab_size, vocab_size - 1)

    def with_sentinels(row: Ints, left_out: npt.NDArray[np.bool_]) -> Ints:
        begins = left_out & ~np.concatenate(([False], left_out[:-1]))
        kept = np.where(begins, first + 1 - np.cumsum(begins), row)[~left_out | begins]
        return np.append(kept, end)

    inputs, labels = [], []
    for row, index in zip(tokens.numpy(), indices.tolist(), strict=True):
        noise = _noise(len(row), np.random.default_rng(hash64((seed, step, index))))
        inputs.append(with_sentinels(row, noise))
        labels.append(with_sentinels(row, ~noise))
    return {"input_ids": torch.from_numpy(np.stack(inputs)), **targets(torch.from_numpy(np.stack(labels)), start)}


def _noise(length: int, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Flags of the tokens in spans; the first token is in none, and the last in one."""
    noise, spans = spans_of(length)
    lengths = np.stack([_parts(length - noise, spans, generator), _parts(noise, spans, generator)], 1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths.ravel())


def _parts(total: int, count: int, generator: np.random.Generator) -> Ints:
    """Random lengths above 0, ``count`` of them, that add up to ``total``."""
    cuts = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))
