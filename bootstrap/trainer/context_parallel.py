"""Context parallelism: each rank holds a part of the sequence, and attention exchanges it for a part of the heads.

Two all-to-alls around scaled_dot_product_attention (DeepSpeed-Ulysses, arXiv:2309.14509), so that the fused kernels,
the causal mask and the CPU work as they are. torch's ring (torch.distributed.tensor.experimental) has no CPU kernel and
joins partial outputs in 32 bits.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional

# Name under which transformers finds the attention. It registers no mask function, so the models make no mask.
NAME = "gpufleet_context"


def split_context(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have ``model`` attend over the sequences that ``group`` splits; call it with ``position_ids`` of its part."""
    ranks = dist.get_world_size(group)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        if key.shape[1] % ranks:
            # Fewer key-value heads than ranks: repeat them, as grouped attention does.
            times = ranks // math.gcd(key.shape[1], ranks)
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        query, key, value = (_to_heads(part.to(value.dtype), group, ranks) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=settings.get("dropout", 0.0),
            is_causal=True,
            scale=settings.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return _to_tokens(out, group, ranks), None

    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME  # type: ignore[union-attr]


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part i (dimension 0) to rank i, and get one of each."""
    parts = parts.contiguous()
    received: torch.Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)  # type: ignore[no-untyped-call]
    return received


def _to_heads(part: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(batch, heads, tokens / ranks, width) to (batch, heads / ranks, tokens, width)."""
    batch, heads, tokens, width = part.shape
    sent = part.view(batch, ranks, heads // ranks, tokens, width).transpose(0, 1)
    received = _exchange(sent, group)  # (ranks, batch, heads / ranks, tokens / ranks, width)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * tokens, width)


def _to_tokens(part: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """(batch, heads / ranks, tokens, width) to (batch, tokens / ranks, heads, width), as transformers wants it."""
    batch, heads, tokens, width = part.shape
    sent = part.view(batch, heads, ranks, tokens // ranks, width).permute(2, 0, 3, 1, 4)
    received = _exchange(sent, group)  # (ranks, batch, tokens / ranks, heads / ranks, width)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // ranks, ranks * heads, width)
