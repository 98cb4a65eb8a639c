"""Decoder transformer that the smoke test trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a decoder, and its batch: sequences of one rank and step."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    seq_len: int
    batch: int


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.projection = nn.Linear(shape.hidden, shape.hidden)
        self.norm_mlp = nn.LayerNorm(shape.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, 4 * shape.hidden), nn.GELU(), nn.Linear(4 * shape.hidden, shape.hidden)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → the same shape."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + torch.as_tensor(self.mlp(self.norm_mlp(x)))


class Decoder(nn.Module):
    """GPT-2-like decoder without dropout: runs on the same data can be compared."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(shape.seq_len, shape.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross entropy (a scalar) of ``tokens`` [batch, seq + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(shape: Shape, *, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Decoder with weights drawn from ``seed`` on the CPU: the same on every rank and device."""
    torch.manual_seed(seed)
    return Decoder(shape).to(device=device, dtype=dtype)


def random_tokens(shape: Shape, sequences: int, *, seed: int) -> torch.Tensor:
    """Token ids [sequences, seq_len + 1] on the CPU, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (sequences, shape.seq_len + 1), generator=generator)
