"""Objectives: model inputs and labels of int64 tokens (samples, length), on the tokens' device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bootstrap.trainer.data.dataset import Batch, hash64
from bootstrap.trainer.loss import IGNORED

# A function of tokens, the samples' indices and the step.
Objective = Callable[[torch.Tensor, torch.Tensor, int], Batch]

# Share of the positions that a masked model predicts (BERT, arXiv:1810.04805, 3.1).
MASKED_SHARE = 0.15


def predict_next(tokens: torch.Tensor, _: torch.Tensor, __: int) -> Batch:
    """Label each token of a decoder with the next one."""
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


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
