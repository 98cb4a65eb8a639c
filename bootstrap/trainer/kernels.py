"""Norms and rotary positions as one kernel each, which transformers computes in several operations.

RMS norms have a kernel of torch's; the one of rotary positions is written in Triton, which needs a C compiler and
Python's headers on the node, as torch.compile does. Without them torch's operations compute the same, slower.

Under autocast to bf16, norms and residual have 16 bits as FSDP2's policy gives them: torch's autocast has norms write
32, to which each layer adds its 16, and casts each norm's output for every product that reads it. fp16 keeps 32 bits,
for their range.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm, rms_norm

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
    """Try the compiler and the rotary kernel on this device; False for a CPU, where compiling costs what it saves."""
    if device_type != "cuda":
        return False
    try:
        compiled(_probe)(torch.zeros(8, device=device_type))
        check_rotation(device_type)
    except Exception as error:  # noqa: BLE001 - Triton's errors and the compiler's have no class in common
        logger.warning(
            "loss and rotary positions have no compiled kernels, and steps take 5 to 15%% longer: %s. If Triton lacks "
            "a C compiler or Python's headers: apt-get install gcc python3-dev (Ubuntu), dnf install gcc python3-devel "
            "(Amazon Linux)", " ".join(str(error).split())[:300],
        )  # fmt: skip
        return False
    return True


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def check_rotation(device_type: str) -> None:
    """Compare the kernel of rotary positions with torch's operations once; RuntimeError where they differ."""
    from bootstrap.trainer.rotary import rotate  # needs Triton

    generator = torch.Generator().manual_seed(0)
    query, key, cos, sin = (torch.randn(shape, generator=generator).to(device_type) for shape in _ROTATED)
    query, key = query.transpose(1, 2).requires_grad_(), key.transpose(1, 2).requires_grad_()
    results = []
    for rotated in (rotate(query, key, cos, sin), (_turned(query, cos, sin), _turned(key, cos, sin))):
        weighted = sum((x * torch.arange(x.shape[-1], device=x.device)).sum() for x in rotated)
        results.append([*rotated, *torch.autograd.grad(weighted, (query, key))])  # type: ignore[arg-type]
    # The kernel may fuse a product and a sum, which rounds once.
    if not all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(*results, strict=True)):
        raise RuntimeError("the kernel of rotary positions computes something else than torch's operations here")


# Two samples, five tokens, three and one heads of width 12: blocks of Triton are powers of two.
_ROTATED = ((2, 5, 3, 12), (2, 5, 1, 12), (2, 5, 12), (2, 5, 12))


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


def narrow(model: nn.Module, first_layers: Iterable[nn.Module]) -> None:
    """Keep norms and residual of ``model`` in bf16 where autocast computes in bf16.

    ``first_layers``: those whose input is the sum of an embedding and a parameter. For others a hook of the first layer
    would make the compiler's graph of it another one than that of the next.
    """
    for part in model.modules():
        if type(part) is nn.LayerNorm:
            part.__class__ = _LayerNorm
        elif isinstance(part, nn.Embedding):
            part.register_forward_hook(lambda _, __, output: _narrowed(output))
    for layer in first_layers:
        layer.register_forward_pre_hook(lambda _, inputs: (_narrowed(inputs[0]), *inputs[1:]))


def _narrowed(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() if _casts_to_bf16(x) else x


def _casts_to_bf16(x: torch.Tensor) -> bool:
    kind = x.device.type
    return not x.is_meta and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16


class _LayerNorm(nn.LayerNorm):
    """nn.LayerNorm; a class, since torch.compile would compile each layer anew for forward passes of objects."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not _casts_to_bf16(input):
            return super().forward(input)
        affine = {name: x.bfloat16() for name, x in self._parameters.items() if x is not None}
        with torch.autocast(input.device.type, enabled=False):
            return layer_norm(input.bfloat16(), self.normalized_shape, **affine, eps=self.eps)


def _rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    # The kernel takes no two types: fp16's autocast gives norms of queries and keys 16 bits, their weights have 32.
    wider = torch.promote_types(hidden_states.dtype, norm.weight.dtype)
    kind = torch.bfloat16 if _casts_to_bf16(hidden_states) else wider
    return rms_norm(hidden_states.to(kind), norm.weight.shape, norm.weight.to(kind), norm.variance_epsilon)


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
    cos, sin = (torch.rand(1, 3, 4, generator=generator) for _ in range(2))
    try:
        theirs = written_out(query, key, cos, sin)
    except (TypeError, RuntimeError):  # complex frequencies, other arguments
        return
    ours = _turned(query, cos, sin), _turned(key, cos, sin)
    if len(theirs) == 2 and all(map(torch.allclose, theirs, ours)):
        setattr(source, ROTARY, _Rotary(written_out))


class _Rotary:
    """transformers' ``apply_rotary_pos_emb``: by one kernel where it rotates whole heads on a GPU."""

    def __init__(self, written_out: Callable[..., Rotated]) -> None:
        self._written_out = written_out

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Rotated:
        fits = unsqueeze_dim == 1 and cos.shape[-1] == q.shape[-1]
        if not fits or torch.compiler.is_compiling() or not can_compile(q.device.type):
            return self._written_out(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        from bootstrap.trainer.rotary import rotate  # needs Triton

        return rotate(q, k, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
