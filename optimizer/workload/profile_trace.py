"""Trace: what every operator of a forward and a backward pass computes, moves and keeps, counted on fake tensors.

A fake tensor (torch._subclasses.FakeTensorMode) has a shape, a type and a storage of a size, and no memory. The tensors
are CPU ones, because the autograd engine refuses CUDA ones on a machine without CUDA; ``as_on_cuda`` makes the
operators that differ behave as they do on a GPU.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Operators autocast computes in fp32 on CUDA and leaves alone on the CPU
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
# Those it computes in fp32 unless the caller names a type: they read 16 bits and keep no copy of their input.
FP32_UNLESS_GIVEN = ("cumprod", "cumsum", "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList")

_CONVOLUTION = {aten.convolution, aten.convolution_backward}
_ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
}
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Places of is_causal among the arguments of the attention operators (native_functions.yaml).
_CAUSAL_AT = {
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_flash_attention_backward: 11,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Within it, tensors have shapes and no values, and modules of them can be converted (``.bfloat16()``)."""
    utils: Any = torch.utils
    log = logging.getLogger("torch._subclasses.fake_tensor")
    weakref_module, level = utils.weakref, log.level
    # Converting a module swaps its parameters, and refuses those with weak references, as FakeTensorMode has to each.
    utils.weakref = SimpleNamespace(getweakrefs=lambda _: [])
    log.setLevel(logging.CRITICAL)  # it logs a traceback of each error, which then is an error of ours
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        utils.weakref = weakref_module
        log.setLevel(level)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within it, CPU tensors go through autocast, dropout and fused attention as CUDA tensors do.

    For the whole process: operators of the CPU are registered anew, and put back at the end.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*other operators may also be overridden")  # they are meant
            _register(library)
        yield
    finally:
        library._destroy()


def _register(library: Any) -> None:
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    for name in FP32_ON_CUDA:
        library.impl(name, _in_fp32(name), "AutocastCPU")
    for name in FP32_UNLESS_GIVEN:
        library.impl(name, _to_fp32(name), "AutocastCPU")
    for name in _only_on_cpu():
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _only_on_cpu() -> list[str]:
    """Operators that autocast casts on the CPU and not on CUDA, such as cross_entropy_loss and reflection_pad2d."""
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
    """One kernel that keeps a byte a mask element, as CUDA has it; the CPU keeps the mask in the input's type."""
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
    """The kernel CUDA would choose: flash in 16 bits without a mask, else memory-efficient, else unfused.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    grouped = query.dim() == 4 and query.size(1) != key.size(1)
    if query.dim() == 4 and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif query.dim() == 4 and not grouped:
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:  # the kernel adds its mask
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -math.inf)
        if bias is not None:
            bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )
    else:
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result: torch.Tensor = found[0]
    return result


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators while it is active; ``start`` begins a new count.

    Attributes:
        alive_bytes: memory of every tensor alive, less those given to ``leave_out``, after each operator.
        flops: useful FLOPs by kind ("matmul", "convolution", "attention"), by phase.
        traffic_bytes: reads and writes of operators that are no products.
        product_elements: elements of operands and results of matrix products.
        convolution_outputs: elements of the results of forward convolutions.
        kernels: operators that do something.
        uncounted: custom operators without a FLOP formula.
        phase: what FLOPs are counted under; set it by hand.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._now = 0
        self.start()

    def mark(self) -> int:
        """Add what is alive now to ``alive_bytes``; its place there."""
        self.alive_bytes.append(self._now)
        return len(self.alive_bytes) - 1

    def start(self) -> None:
        """Forget what was counted, not what is alive."""
        self.alive_bytes: list[int] = [self._now]
        self.flops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.traffic_bytes = 0
        self.product_elements = 0
        self.convolution_outputs = 0
        self.kernels = 0
        self.uncounted: set[str] = set()
        self.phase = "forward"

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count this tensor's memory, from now on."""
        key = self._watch(tensor)
        self._now -= self._sizes[key]
        self._sizes[key] = 0

    def _watch(self, tensor: torch.Tensor) -> int:
        """Count the memory of the tensor's storage until it is freed; several tensors may share one."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._watched[key] = weakref.ref(storage, lambda _: self._freed(key))
            self._now += self._sizes[key]
        return key

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
        del self._watched[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # asks a tensor for its device
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        read = {id(tensor.untyped_storage()) for tensor in inputs}
        for tensor in outputs:
            self._watch(tensor)
        self.mark()
        packet = func._overloadpacket
        is_view = not func._schema.is_mutable and all(id(tensor.untyped_storage()) in read for tensor in outputs)
        if not outputs or is_view or packet in _EMPTY:
            return out
        self.kernels += 1
        kind, flops = _flops(func, packet, args, kwargs, out)
        if kind:
            self.flops[self.phase][kind] += flops
        if kind == "matmul":
            self.product_elements += sum(tensor.numel() for tensor in [*inputs, *outputs] if tensor.dim() > 1)
        if packet is aten.convolution:
            self.convolution_outputs += outputs[0].numel()
        if not kind:
            self.traffic_bytes += sum(_moved(tensor) for tensor in [*inputs, *outputs])
            if func.namespace not in ("aten", "prims"):
                self.uncounted.add(str(packet))
        return out


def _moved(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that one kernel reads or writes; a broadcast one is read once."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _flops(func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, int]:
    """Kind and useful FLOPs of one operator; an empty kind for what is no product."""
    if packet in _CONVOLUTION:
        return "convolution", _convolution_flops(packet, args, out)
    if packet in _ATTENTION:
        return "attention", _attention_flops(packet, args, kwargs)
    formula = flop_registry.get(packet)
    if formula is None:
        return "", 0
    return "matmul", int(formula(*args, **kwargs, out_val=out))


def _convolution_flops(packet: Any, args: Any, out: Any) -> int:
    """A multiply-add as two; torch's own formula counts the backward pass of a grouped convolution ``groups`` times."""
    backward = packet is aten.convolution_backward
    small, weight = (args[1], args[2]) if backward else (args[0], args[1])
    large = args[0] if backward else out
    transposed = args[7] if backward else args[6]
    places = math.prod((small if transposed else large).shape[2:])
    once = int(2 * small.shape[0] * places * weight.numel())
    return once * sum(args[10][:2]) if backward else once


def _attention_flops(packet: Any, args: Any, kwargs: Any) -> int:
    """Two products of all queries with all keys; half of it under a causal mask.

    The backward pass counts twice the forward's: the kernels compute the scores again, which is not useful work.
    """
    backward = packet in (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
    )
    query, key, value = args[1:4] if backward else args[:3]
    at = _CAUSAL_AT[packet]
    causal = kwargs.get("is_causal", args[at] if len(args) > at else False)
    batch, heads, queries, width = query.shape
    scores = batch * heads * queries * key.shape[2]
    once = int(2 * scores * (width + value.shape[3]))
    return (once // 2 if causal else once) * (2 if backward else 1)
