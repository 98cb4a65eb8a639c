"""Cross-entropy that keeps one 16-bit tensor of the logits' size: its gradient takes the logits' place.

Eager cross-entropy on 16-bit logits holds 12 bytes a logit at its peak and moves 55; this holds 2 and moves 22 (6
compiled). With a vocabulary of 128k the logits are the largest tensor of a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bootstrap.trainer import kernels

IGNORED = -100
# 32-bit logits of one turn: 512 MiB. The host starts a dozen kernels a turn.
TURN_ELEMENTS = 2**27


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    compiled: bool = False,
) -> torch.Tensor:
    """Sum of the negative log-likelihoods of all labels but ``IGNORED``; float32, for ``backward()`` itself.

    The gradient is that of ``weight`` times the sum, whatever the gradient that comes in, and overwrites the logits.

    Args:
        logits: (..., vocabulary); with ``group`` this rank's part of the vocabulary, the parts in order of rank.
        labels: int64 (...).
        weight: float32 scalar on the device.
        group: tensor ranks that split the vocabulary.
        first: label of this rank's first logit.
        compiled: by torch.compile, in two kernels and without turns.
    """
    total: torch.Tensor = _CrossEntropy.apply(logits, labels, weight, group, first, compiled)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        group: Any,
        first: int,
        compiled: bool,
    ) -> torch.Tensor:
        vocabulary = logits.shape[-1]
        flat, targets = logits.detach().view(-1, vocabulary), labels.reshape(-1)
        total = torch.zeros((), device=logits.device)
        turn = len(flat) if compiled else max(1, TURN_ELEMENTS // vocabulary)
        for rows, target in zip(torch.split(flat, turn), torch.split(targets, turn), strict=True):
            valid = target != IGNORED
            own = valid & (target >= first) & (target < first + vocabulary)
            index = torch.where(own, target - first, 0)[:, None]
            replace = _replaced_by_compiler if compiled else _replaced
            total -= torch.where(valid, replace(rows, index, own, weight * valid, group), 0.0).sum()
        ctx.gradient = logits.detach()
        return total

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None, None, None, None, None


def _replaced(
    rows: torch.Tensor, index: torch.Tensor, own: torch.Tensor, scale: torch.Tensor, group: Any
) -> torch.Tensor:
    """Log-likelihood of each row's label; the rows become the gradient of their negative sum times ``scale``."""
    logs = torch.log_softmax(rows, -1, dtype=torch.float32)
    picked = logs.gather(1, index)[:, 0]
    part = rows[:, 0].float() - logs[:, 0]
    probabilities = logs.exp_()
    if group is not None:
        picked, whole = _joined(part, picked + part, own, group)
        probabilities.mul_((part - whole).exp()[:, None])
    probabilities.scatter_add_(1, index, -own[:, None].to(torch.float32))
    torch.mul(probabilities, scale[:, None], out=rows)
    return picked


def _joined(
    part: torch.Tensor, logit: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-likelihood of each label and log-sum-exp over all parts, from those of each rank's part."""
    mine = torch.stack([part, torch.where(own, logit, -torch.inf)])
    parts = mine.new_empty((2 * dist.get_world_size(group), len(part)))
    dist.all_gather_into_tensor(parts, mine, group=group)
    whole = parts[0::2].logsumexp(0)
    return parts[1::2].amax(0) - whole, whole


def _replaced_by_compiler(
    rows: torch.Tensor, index: torch.Tensor, own: torch.Tensor, scale: torch.Tensor, group: Any
) -> torch.Tensor:
    """Do as ``_replaced`` with two reads and one write of the rows."""
    whole, logit = kernels.compiled(_log_sum_exp)(rows, index)
    picked: torch.Tensor = logit - whole
    if group is not None:
        picked, whole = _joined(whole, logit, own, group)
    kernels.compiled(_write_gradient)(rows, index, own, scale, whole)
    return picked


def _log_sum_exp(rows: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.float().logsumexp(-1), rows.gather(1, index)[:, 0].float()


def _write_gradient(
    rows: torch.Tensor, index: torch.Tensor, own: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor
) -> None:
    probabilities = (rows.float() - whole[:, None]).exp()
    # A comparison is fused into this kernel; a scatter would be a second kernel.
    label = (torch.arange(rows.shape[1], device=rows.device) == index) & own[:, None]
    rows.copy_((probabilities - label.float()) * scale[:, None])
