"""Fake CPU tensors that behave as CUDA tensors do: torch's autograd refuses CUDA tensors on a machine without CUDA.

A fake tensor (torch._subclasses.FakeTensorMode) has a shape, a type and a storage size, and takes no memory.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# Operators that autocast computes in fp32 on CUDA and not on the CPU
# (https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-autocast-to-float32; a test asks the dispatcher).
FP32_ON_CUDA = (
    "acos", "asin", "cosh", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "frobenius_norm.dim",
    "group_norm", "layer_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log",
    "log10", "log1p", "log2", "logsumexp", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim", "nuclear_norm",
    "nuclear_norm.dim", "pdist", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm",
    "rsqrt", "sinh", "softplus", "tan", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)  # fmt: skip
# Operators computed in fp32 unless the caller names a type: they read 16 bits and keep no copy of their input.
FP32_UNLESS_GIVEN = ("cumprod", "cumsum", "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context in which tensors have no values, and modules can be converted (``.bfloat16()``)."""
    utils: Any = torch.utils
    log = logging.getLogger("torch._subclasses.fake_tensor")
    weakref_module, level = utils.weakref, log.level
    # Converting a module swaps its parameters, and refuses parameters with weak references, which FakeTensorMode makes.
    utils.weakref = SimpleNamespace(getweakrefs=lambda _: [])
    log.setLevel(logging.CRITICAL)  # it logs a traceback of errors that gpufleet reports
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        utils.weakref = weakref_module
        log.setLevel(level)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context in which CPU tensors go through autocast, dropout and attention as CUDA tensors do.

    It replaces the process's CPU operators and restores them at the end.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    onednn = torch._C._get_mkldnn_enabled()
    # oneDNN runs an LSTM as one operator, which has no FLOP formula and whose fake kernel keeps no gates.
    torch._C._set_mkldnn_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*other operators may also be overridden")  # on purpose
            _register(library)
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        library._destroy()


def _register(library: Any) -> None:
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    for name in FP32_ON_CUDA:
        library.impl(name, _in_fp32(name), "AutocastCPU")
    for name in FP32_UNLESS_GIVEN:
        library.impl(name, _to_fp32(name), "AutocastCPU")
    for name in _cast_on_cpu_only():
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _cast_on_cpu_only() -> list[str]:
    """Operators that autocast casts on the CPU only, such as cross_entropy_loss."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    casts = torch._C._dispatch_has_kernel_for_dispatch_key
    return [
        name.removeprefix("aten::") for name in names if casts(name, "AutocastCPU") and not casts(name, "AutocastCUDA")
    ]


def _in_fp32(name: str) -> Any:
    operator = _operator(name)
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widen(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if narrow else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(*tree_map(widen, args), **tree_map(widen, kwargs))

    return kernel


def _to_fp32(name: str) -> Any:
    operator = _operator(name)
    places = [argument.name for argument in operator._schema.arguments]
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args, strict=False)) | kwargs
        first = given.pop("self")
        if given.get("dtype") is None and first.dtype in (torch.float16, torch.bfloat16):
            given["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(first, **given)

    return kernel


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's one kernel, which keeps a byte a mask element; the CPU keeps the mask in the input's type."""
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(
    x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """One kernel on CUDA, several operators on the CPU."""
    result: torch.Tensor = aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]
    return result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel CUDA would choose: flash in 16 bits without a mask, else memory-efficient, else unfused.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    grouped = query.dim() == 4 and query.size(1) != key.size(1)
    if query.dim() == 4 and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        outputs = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif query.dim() == 4 and not grouped:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:  # the kernel adds the mask to the scores
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -math.inf)
        if bias is not None:
            bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        outputs = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    else:
        outputs = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result: torch.Tensor = outputs[0]
    return result
