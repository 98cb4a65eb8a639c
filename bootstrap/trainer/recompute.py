"""Selective activation checkpointing of eager layers: outputs of products and attention are computed once.

torch's own (``create_selective_checkpoint_contexts``) runs Python in every operation of the forward pass and of the
recomputation, and the GPU waits for it: 0.17 s of a step of 0.3 s (28 layers, two H200). While a layer runs, its
products and attention are replaced instead: the host takes as long as for full checkpointing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear, scaled_dot_product_attention

addmm = torch.addmm
# Output that a layer keeps, whether it requires a gradient, and its version, by which a change in place shows.
Output = tuple[torch.Tensor, bool, int]


def keeping(last: tuple[int, int], rank: int = 0) -> tuple[LayerPass, LayerPass]:
    """Return the contexts of one layer's forward pass and of its recomputation.

    Two products are not kept: the layer's last, of shape ``last`` (outputs, inputs), as recomputation ends before it,
    and an adapter's second, over ``rank``: its output is as large as its projection's, and cheap to compute again.
    """
    outputs: deque[Output] = deque()
    return LayerPass(outputs, last, rank, is_again=False), LayerPass(outputs, last, rank, is_again=True)


def kept(change: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``change(x)``, which a selectively checkpointed layer computes once; ``change`` must save no tensor."""
    running = LayerPass.running
    return change(x) if running is None else running.once(lambda: change(x))


class LayerPass:
    """One pass through a layer: the forward pass keeps ``outputs``, in whose order the recomputation takes them."""

    running: ClassVar[LayerPass | None] = None

    def __init__(self, outputs: deque[Output], last: tuple[int, int], rank: int, *, is_again: bool) -> None:
        self._outputs, self._last, self._rank, self._is_again = outputs, last, rank, is_again

    def __enter__(self) -> None:
        LayerPass.running = self
        self._replaced = nn.functional.linear, nn.functional.scaled_dot_product_attention, torch.addmm
        _replace(self._linear, self._attend, self._addmm)

    def __exit__(self, *_: object) -> None:
        LayerPass.running = None
        _replace(*self._replaced)

    def once(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute an output in the forward pass, and return it in the recomputation."""
        if self._is_again:
            output, requires_grad = self._before()
            return output.requires_grad_(requires_grad)
        return self._keep(compute())

    def _keep(self, output: torch.Tensor) -> torch.Tensor:
        self._outputs.append((output.detach(), output.requires_grad, output._version))
        return output

    def _before(self) -> tuple[torch.Tensor, bool]:
        output, requires_grad, version = self._outputs.popleft()
        if output._version != version:
            raise RuntimeError(
                "an output that selective activation checkpointing keeps was changed in place: use "
                "--activation-checkpointing full"
            )
        return output, requires_grad

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape == self._last or weight.shape[1] == self._rank:
            return linear(x, weight, bias)
        if not torch.is_grad_enabled():  # inside bitsandbytes' products
            return self.once(lambda: linear(x, weight, bias))
        if torch.is_autocast_enabled(kind := x.device.type):
            half = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(half), weight.to(half), bias if bias is None else bias.to(half)
        before = self._before()[0] if self._is_again else None
        output: torch.Tensor = _Product.apply(x, weight, bias, before)  # type: ignore[no-untyped-call]
        return output if self._is_again else self._keep(output)

    def _addmm(self, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **settings: Any) -> torch.Tensor:
        """GPT-2's projections."""
        return addmm(bias, x, weight, **settings) if settings else self._linear(x, weight.T, bias)

    def _attend(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **settings: Any
    ) -> torch.Tensor:
        """Attend once; queries, keys and values are computed again for the backward pass."""
        # Dropout draws random numbers, which must come in the same order again. Kernels save a mask in a form of their
        # own, which would be kept for each layer.
        if dropout_p or attn_mask is not None:
            return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **settings)
        node: list[Any] = []
        query, key, value = _Inputs.apply(node, query, key, value)  # type: ignore[no-untyped-call]
        # No tensors, which the hook would keep.
        numbers = {(x.data_ptr(), x.shape): number for number, x in enumerate((query, key, value))}
        restored: list[torch.Tensor] = []

        def pack(saved: torch.Tensor) -> Any:
            return numbers.get((saved.data_ptr(), saved.shape), saved)

        def unpack(packed: torch.Tensor | int) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            if not restored:
                restored.extend(node[0].saved_tensors)
            return restored[packed]

        def compute() -> torch.Tensor:
            with saved_tensors_hooks(pack, unpack):
                return scaled_dot_product_attention(query, key, value, **settings)

        return self.once(compute)


def _replace(projection: Any, attention: Any, sum_of_products: Any) -> None:
    nn.functional.linear, nn.functional.scaled_dot_product_attention = projection, attention
    torch.addmm = sum_of_products


class _Product(torch.autograd.Function):
    """Linear map, computed where ``before``, its output, is None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias) if before is None else before

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            (rows @ weight).view(x.shape) if needs_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


class _Inputs(torch.autograd.Function):
    """Inputs as they are, saved as a checkpoint saves: computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, node: list[Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*inputs)
        node.append(ctx)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *gradients
