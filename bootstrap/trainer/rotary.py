"""Rotary positions of queries and keys by one Triton kernel, which also computes the gradients.

torch.compile writes as fast a kernel, and takes 0.4 ms of the host for each call (two H100, torch 2.11,
tests/benchmarks/results/trainer_torchtitan_2xh100_202611.md): more than small micro-batches compute in a layer.
Importing this module needs Triton.
"""

from __future__ import annotations

# Triton has no types.
# mypy: disable-error-code="import-untyped, no-untyped-call, no-untyped-def, untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

Rotated = tuple[torch.Tensor, torch.Tensor]


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    """Turn queries and keys (batch, heads, tokens, width) by ``cos`` and ``sin`` (batch or 1, tokens, width)."""
    rotated: Rotated = _Rotation.apply(query, key, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        ctx.save_for_backward(cos, sin)
        return _turned(query, key, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        query, key = _turned(*gradients, *ctx.saved_tensors, back=True)
        return query, key, None, None


def _turned(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool) -> Rotated:
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, cos, sin))
    if cos.stride() != sin.stride():  # the kernel has one stride for both
        cos, sin = cos.contiguous(), sin.contiguous()
    outputs = torch.empty_like(query), torch.empty_like(key)
    samples, heads, tokens, width = query.shape
    strides = [stride for x in (query, key, *outputs) for stride in x.stride()[:3]]
    # Positions are the same for all samples, or each has its own.
    strides += [cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)]
    block = [triton.next_power_of_2(size) for size in (heads, key.shape[1], width // 2)]
    _turn[tokens, samples](
        query, key, *outputs, cos, sin, *strides, heads, key.shape[1], width // 2, *block, -1.0 if back else 1.0
    )  # fmt: skip
    return outputs


@triton.jit
def _turn(
    query, key, query_out, key_out, cos, sin,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    qo_sample, qo_head, qo_token, ko_sample, ko_head, ko_token, turn_sample, turn_token,
    q_heads: tl.constexpr, k_heads: tl.constexpr, half: tl.constexpr,
    q_block: tl.constexpr, k_block: tl.constexpr, half_block: tl.constexpr, direction: tl.constexpr,
):  # fmt: skip
    """One token of one sample: all heads of query and key."""
    token, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = tl.arange(0, half_block)[None]
    turns = sample * turn_sample + token * turn_token + first
    cos_1, cos_2 = tl.load(cos + turns, first < half), tl.load(cos + turns + half, first < half)
    sin_1, sin_2 = tl.load(sin + turns, first < half), tl.load(sin + turns + half, first < half)
    if direction < 0:
        sin_1, sin_2 = -sin_2, -sin_1
    query += sample * q_sample + token * q_token
    query_out += sample * qo_sample + token * qo_token
    _turn_heads(query, query_out, q_head, qo_head, cos_1, cos_2, sin_1, sin_2, q_heads, half, q_block, half_block)
    key += sample * k_sample + token * k_token
    key_out += sample * ko_sample + token * ko_token
    _turn_heads(key, key_out, k_head, ko_head, cos_1, cos_2, sin_1, sin_2, k_heads, half, k_block, half_block)


@triton.jit
def _turn_heads(
    source, target, source_head, target_head, cos_1, cos_2, sin_1, sin_2,
    heads: tl.constexpr, half: tl.constexpr, block: tl.constexpr, half_block: tl.constexpr,
):  # fmt: skip
    first = tl.arange(0, half_block)[None]
    head = tl.arange(0, block).to(tl.int64)[:, None]
    used = (head < heads) & (first < half)
    source += head * source_head + first
    target += head * target_head + first
    x_1, x_2 = tl.load(source, used).to(tl.float32), tl.load(source + half, used).to(tl.float32)
    tl.store(target, x_1 * cos_1 - x_2 * sin_1, used)
    tl.store(target + half, x_2 * cos_2 + x_1 * sin_2, used)
