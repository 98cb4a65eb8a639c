"""Trace: counts the FLOPs, traffic and memory of every operator of a forward and a backward pass."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_CONVOLUTION = {aten.convolution, aten.convolution_backward}
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Cheap operators of aten's linalg. Its others, distances and nn.Bilinear have no FLOP formula.
_CHEAP = {aten.linalg_vector_norm, aten.linalg_cross, aten._linalg_check_errors}
_UNCOUNTED = {aten._cdist_forward, aten._cdist_backward, aten._trilinear}
# Index of is_causal among the arguments of the attention operators (native_functions.yaml).
_CAUSAL_INDEX = {
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_flash_attention_backward: 11,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}


@dataclass(kw_only=True)
class Counts:
    """Counts of one pass.

    Attributes:
        alive_bytes: after each operator, memory of all tensors alive, without those given to ``Trace.leave_out``.
        saved_index: index in ``alive_bytes`` at which the backward pass begins.
        flops: useful FLOPs by phase and kind ("matmul", "convolution", "attention").
        traffic_bytes: reads and writes of operators other than products.
        product_elements: elements of operands and results of matrix products.
        convolution_outputs: elements of the results of forward convolutions.
        idle_parameters: parameters of experts that a token does not pass through.
        uncounted: operators whose FLOPs are missing.
    """

    alive_bytes: list[int]
    saved_index: int = 0
    flops: dict[str, Counter[str]] = field(default_factory=lambda: {"forward": Counter(), "backward": Counter()})
    traffic_bytes: int = 0
    product_elements: int = 0
    convolution_outputs: int = 0
    kernels: int = 0
    idle_parameters: int = 0
    uncounted: set[str] = field(default_factory=set)


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators while active; ``start`` begins new ``counts``, ``start_backward`` the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._now = 0
        self._experts_per_token = 0
        self.start()

    def start(self) -> None:
        """Reset the counts, not the memory alive."""
        self.counts = Counts(alive_bytes=[self._now])
        self._phase = "forward"

    def start_backward(self) -> None:
        """Count as the backward pass from here on."""
        self.counts.saved_index = len(self.counts.alive_bytes)
        self.counts.alive_bytes.append(self._now)
        self._phase = "backward"

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor's memory."""
        key = self._watch(tensor)
        self._now -= self._sizes[key]
        self._sizes[key] = 0

    def _watch(self, tensor: torch.Tensor) -> int:
        """Count the storage's memory until it is freed; tensors may share one."""
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
        packet = func._overloadpacket
        out = _grouped_product(*args) if packet is aten._grouped_mm else func(*args, **kwargs)
        if func.namespace == "prim":  # a query for the device
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        read = {id(tensor.untyped_storage()) for tensor in inputs}
        for tensor in outputs:
            self._watch(tensor)
        counts = self.counts
        counts.alive_bytes.append(self._now)
        is_view = not func._schema.is_mutable and all(id(tensor.untyped_storage()) in read for tensor in outputs)
        if not outputs or is_view or packet in _EMPTY:
            return out
        counts.kernels += 1
        kind, flops = _flops(func, packet, args, kwargs, out)
        if kind:
            counts.flops[self._phase][kind] += flops
        if packet is aten.topk:  # a router's last choice before its experts' products
            self._experts_per_token = args[1]
        if packet is aten._grouped_mm and self._phase == "forward":
            experts = args[1].shape[0]
            idle = max(0, experts - self._experts_per_token)
            counts.idle_parameters += args[1].numel() // experts * idle
        if kind == "matmul":
            counts.product_elements += sum(tensor.numel() for tensor in [*inputs, *outputs] if tensor.dim() > 1)
        if packet is aten.convolution:
            counts.convolution_outputs += outputs[0].numel()
        if not kind:
            # A broadcast tensor is read once.
            counts.traffic_bytes += sum(
                min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
                for tensor in [*inputs, *outputs]
            )
            solves = "linalg" in str(packet) and packet not in _CHEAP
            if func.namespace not in ("aten", "prims") or packet in _UNCOUNTED or solves:
                counts.uncounted.add(str(packet))
        return out


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, *_: Any) -> torch.Tensor:
    """Result of experts' grouped product: rows of tokens, or for their weights' gradient a matrix an expert.

    Fake tensors take 16 bits only, CUDA takes 32 too (torch/_meta_registrations.py, _meta_grouped_mm_common).
    """
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])


def _flops(func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> tuple[str, int]:
    """Kind and useful FLOPs of one operator; no kind for operators other than products."""
    if packet in _CONVOLUTION:
        return "convolution", _convolution_flops(packet, args, out)
    if packet in _CAUSAL_INDEX:
        return "attention", _attention_flops(packet, args, kwargs)
    if packet is aten._grouped_mm:  # each row is multiplied with one expert's matrix
        left, right = args[:2]
        return "matmul", 2 * left.numel() * right.shape[-1]
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
    """Two products of all queries with all keys; half under a causal mask.

    The backward pass counts as two forward passes: recomputing the scores is not useful work.
    """
    backward = packet in (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
    )
    query, key, value = args[1:4] if backward else args[:3]
    index = _CAUSAL_INDEX[packet]
    causal = kwargs.get("is_causal", args[index] if len(args) > index else False)
    batch, heads, queries, width = query.shape
    scores = batch * heads * queries * key.shape[2]
    once = int(2 * scores * (width + value.shape[3]))
    return (once // 2 if causal else once) * (2 if backward else 1)
