"""One kernel each for RMS norms and rotary positions, which transformers computes in several operations.

For models that torch.compile does not compile themselves. RMS norms have a kernel of torch's. torch.compile writes the
one of rotary positions by Triton, which needs a C compiler and Python's headers on the node; without them torch's
operations compute the same, slower.
"""

from __future__ import annotations

import copy
import functools
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

logger = logging.getLogger(__name__)

Rotated = tuple[torch.Tensor, torch.Tensor]
ROTARY = "apply_rotary_pos_emb"


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, for each shape of its inputs anew.

    Kernels for any shape, which torch.compile writes for the second one (an evaluation's), would replace those of the
    training: a resumed run would differ in the last bits.
    """
    result: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return result


@functools.cache
def can_compile(device_type: str) -> bool:
    """Try whether the compiler runs for this kind of device; False for a CPU, where it takes longer than it saves."""
    if device_type != "cuda":
        return False
    try:
        compiled(_probe)(torch.zeros(8, device=device_type))
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "loss and rotary positions have no compiled kernels, and steps take 5 to 15%% longer: %s. Triton needs a C "
            "compiler and Python's headers (Ubuntu: apt-get install gcc python3-dev; Amazon Linux: dnf install gcc "
            "python3-devel)", " ".join(str(error).split())[:300],
        )  # fmt: skip
        return False
    return True


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def fuse(model: nn.Module) -> None:
    """Have one kernel each compute norms and rotary positions of ``model`` where the result is the same.

    Names do not tell where (T5LayerNorm, GemmaRMSNorm, GPT-J's rotary positions), so each kind is tried. Gemma's norms,
    which scale by one plus the weight in 32 bits, stay.
    """
    fits: dict[type[nn.Module], bool] = {}
    for part in model.modules():
        kind = type(part)
        if kind not in fits:
            fits[kind] = _is_plain_rms_norm(part)
            _fuse_rotary(sys.modules[kind.__module__])
        if fits[kind]:
            part.forward = functools.partial(_rms_norm, part)


def _rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    # Under autocast norms of queries and keys get 16 bits, and the kernel takes no two types.
    wider = torch.promote_types(hidden_states.dtype, norm.weight.dtype)
    return rms_norm(hidden_states.to(wider), norm.weight.shape, norm.weight.to(wider), norm.variance_epsilon)


def _is_plain_rms_norm(module: Any) -> bool:
    if set(module._parameters) != {"weight"} or not hasattr(module, "variance_epsilon"):
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(2, *module.weight.shape, generator=generator)
    probe = copy.copy(module)
    probe._parameters = {"weight": torch.rand(module.weight.shape, generator=generator)}
    with torch.no_grad():
        return torch.allclose(probe(inputs), _rms_norm(probe, inputs))


def _fuse_rotary(source: Any) -> None:
    """Replace the function by which all layers of a module of transformers rotate queries and keys."""
    written_out = getattr(source, ROTARY, None)
    if written_out is None or isinstance(written_out, _Rotary):
        return
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(1, heads, 3, 4, generator=generator) for heads in (2, 1))
    turns = [torch.rand(1, 3, 4, generator=generator) for _ in range(2)]
    try:
        theirs = written_out(query, key, *turns)
    except (TypeError, RuntimeError):  # complex frequencies, other arguments
        return
    ours = _rotate(query, key, *(turn[:, None] for turn in turns))
    if len(theirs) == 2 and all(map(torch.allclose, theirs, ours)):
        setattr(source, ROTARY, _Rotary(written_out))


class _Rotary:
    """transformers' ``apply_rotary_pos_emb``: by one kernel where it rotates whole heads on a GPU."""

    def __init__(self, written_out: Callable[..., Rotated]) -> None:
        self._written_out = written_out

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        whole = cos.shape[-1] == q.shape[-1]
        if not whole or torch.compiler.is_compiling() or not can_compile(q.device.type):
            return self._written_out(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        rotated: Rotated = _Rotation.apply(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))  # type: ignore[no-untyped-call]
        return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
        ctx.save_for_backward(cos, sin)
        rotated: Rotated = compiled(_rotate)(query.detach(), key.detach(), cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        query, key = compiled(_rotate_back)(*gradients, *ctx.saved_tensors)
        return query, key, None, None


def _rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    # Under autocast cosines have 32 bits, and attention would cast the result to 16.
    return tuple((x * cos + _half_turn(x) * sin).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def _rotate_back(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Rotated:
    return tuple((x * cos - _half_turn(x * sin)).to(x.dtype) for x in (query, key))  # type: ignore[return-value]


def _half_turn(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
