"""Tensor parallelism of Hugging Face's Llama-like decoders.

Projections into heads and feed-forward units are split by columns, projections out of them by rows, embedding and
output by vocabulary (arXiv:1909.08053); with sequence parallelism norms and residual have a part of the tokens
(arXiv:2205.05198). Parameters are DTensors, for FSDP2, checkpoints and the optimizer; modules compute on this rank's
part as plain tensors, and whole parameters whose gradients each rank has a part of are summed once a step.

torch's styles compute with DTensors: their dispatch keeps the host busy longer than the GPU, the gradient of an input
that several projections share is reduced once for each, and that of each norm by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import embedding

from bootstrap.trainer.optimize import local
from bootstrap.trainer.recompute import kept

functional: Any = torch.ops._c10d_functional
untyped_dtensor: Any = DTensor  # whose constructor has no types

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
# Placement of a layer's parameters; biases of row-split projections are whole.
SPLIT: dict[str, Placement] = {
    "self_attn.q_proj": COLUMNS,
    "self_attn.k_proj": COLUMNS,
    "self_attn.v_proj": COLUMNS,
    "self_attn.o_proj": ROWS,
    "mlp.gate_proj": COLUMNS,
    "mlp.up_proj": COLUMNS,
    "mlp.down_proj": ROWS,
}
# Attribute of a module: names of its partial parameters.
PARTIAL = "partial_parameters"
Change = Callable[[torch.Tensor], torch.Tensor]
Exchange = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def split_layer(layer: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split one decoder layer; with ``sequence_parallel`` norms and residual keep a part of the tokens."""
    gather, reduce = _exchanges(mesh, sequence_parallel)
    for name, part in layer.named_modules():
        # A head's norm (Qwen 3) sees this rank's heads; under sequence parallelism every norm sees its tokens.
        summed = sequence_parallel or name.endswith(("q_norm", "k_norm"))
        _place(part, mesh, SPLIT.get(name, WHOLE), summed=summed)
    for block in (layer.self_attn, layer.mlp):
        _change_input(block, gather)  # type: ignore[arg-type]
    _change_output(layer.self_attn.o_proj, partial(kept, reduce))  # type: ignore[union-attr, arg-type]
    _change_output(layer.mlp.down_proj, reduce)  # type: ignore[union-attr, arg-type]


def split_ends(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split embedding and output projection by vocabulary; each rank gets the logits of its part."""
    gather, reduce = _exchanges(mesh, sequence_parallel)
    tokens, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    tied = head.weight is tokens.weight
    _place(tokens, mesh, COLUMNS, summed=False)
    _place(norm, mesh, WHOLE, summed=sequence_parallel)
    if tied:
        head.weight = tokens.weight
    _place(head, mesh, COLUMNS, summed=False)
    first = first_token(mesh, tokens.weight.shape[0])

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        weight = tokens.weight
        mine = (ids >= first) & (ids < first + len(weight))
        return reduce(embedding(torch.where(mine, ids - first, 0), weight) * mine[..., None])

    tokens.forward = _on_own_part(tokens, look_up)
    _change_input(head, gather)


def first_token(mesh: DeviceMesh, vocab_size: int) -> int:
    """First token of this rank's part of the vocabulary; the last ranks have fewer where they cannot be equal."""
    return mesh.get_local_rank() * -(-vocab_size // mesh.size())


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Whole parameters whose gradients are each rank's part of a sum."""
    found = (getattr(module, name) for module in model.modules() for name in getattr(module, PARTIAL, ()))
    return [parameter for parameter in found if parameter.requires_grad]


def sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of ``partial_parameters`` over the tensor ranks, all in one collective."""
    parts = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not parts:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    sums = torch.split(flat, [part.numel() for part in parts])
    torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement, *, summed: bool) -> None:
    """Make the module's own parameters DTensors, and have its forward pass compute on this rank's part."""
    if not module._parameters:
        return
    in_parts = []
    for name, parameter in module.named_parameters(recurse=False):
        is_row_bias = placement == ROWS and parameter.ndim == 1
        placed = WHOLE if is_row_bias else placement
        if not isinstance(parameter, DTensor):
            whole = distribute_tensor(parameter.data, mesh, [placed], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))
        if is_row_bias or (summed and placed == WHOLE):
            in_parts.append(name)
    setattr(module, PARTIAL, in_parts)
    # The ranks' products are summed, and with them what each adds of the bias.
    module.forward = _on_own_part(module, module.forward, bias_share=mesh.size() if placement == ROWS else 1)


def _on_own_part(module: nn.Module, forward: Callable[..., Any], bias_share: int = 1) -> Callable[..., Any]:
    def on_own_part(*arguments: Any, **settings: Any) -> Any:
        kept = dict(module._parameters)
        for name, parameter in kept.items():
            if isinstance(parameter, DTensor):
                own: Any = parameter.to_local() if torch.compiler.is_compiling() else _OwnPart.apply(parameter)
                module._parameters[name] = own / bias_share if name == "bias" and bias_share > 1 else own
        try:
            return forward(*arguments, **settings)
        finally:
            module._parameters.update(kept)

    return on_own_part


class _OwnPart(torch.autograd.Function):
    """``DTensor.to_local``, whose backward pass takes 70 us of the host to describe the gradient anew."""

    @staticmethod
    def forward(ctx: Any, whole: Any) -> torch.Tensor:
        ctx.spec = whole._spec
        part: torch.Tensor = whole._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> DTensor:
        whole: DTensor = untyped_dtensor(gradients[0], ctx.spec, requires_grad=False)
        return whole


def _change_input(module: nn.Module, change: Change) -> None:
    def before(_: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), settings
        return arguments, settings | {"hidden_states": change(settings["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _change_output(module: nn.Module, change: Change) -> None:
    module.register_forward_hook(lambda _, __, output: change(output))


def _exchanges(mesh: DeviceMesh, sequence_parallel: bool) -> tuple[Change, Change]:
    """Give each rank all tokens before a split module, and the sum of the ranks' outputs after it."""
    group = mesh.get_group()
    there, back = (_gather, _scatter) if sequence_parallel else (_same, _sum)
    return partial(_Exchange.apply, there, back, group), partial(_Exchange.apply, back, there, group)


def _collective(operation: Any, x: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Run a functional collective, which selective checkpointing knows; its own autograd takes 0.2 ms of the host."""
    below = contextlib.nullcontext() if torch.compiler.is_compiling() else torch._C._AutoDispatchBelowAutograd()
    with below:
        result: torch.Tensor = functional.wait_tensor(operation(x.contiguous(), *settings))
    return result


def _same(x: torch.Tensor, _: dist.ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _collective(functional.all_reduce, x, "sum", group.group_name)


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    parts = _collective(functional.all_gather_into_tensor, x, ranks, group.group_name)
    return parts.view(ranks, *x.shape).transpose(0, 1).flatten(1, 2)


def _scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    parts = x.view(len(x), ranks, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
    return _collective(functional.reduce_scatter_tensor, parts, "sum", ranks, group.group_name)


class _Exchange(torch.autograd.Function):
    """One exchange of the ranks in the forward pass, and its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, there: Exchange, back: Exchange, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        return None, None, None, ctx.back(gradients[0], ctx.group)
