"""Masked-language-model batches, as BERT's (https://arxiv.org/abs/1810.04805, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bootstrap.trainer.data.dataset import Batch, hash64

# Label that the losses of torch and transformers leave out.
IGNORED = -100


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
