"""Tensor parallelism of Hugging Face's Llama-like decoders.

Projections into heads and feed-forward units are split by columns, projections out of them by rows, embedding and
output by vocabulary (arXiv:1909.08053); with sequence parallelism norms and residual have a part of the tokens
(arXiv:2205.05198). Parameters are DTensors, for FSDP2, checkpoints and the optimizer; modules compute on this rank's
part as plain tensors. torch's styles compute with DTensors: their dispatch keeps the host busy longer than the GPU, and
the gradient of an input that several projections share is reduced once for each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import embedding

# Untyped in torch.
collectives: Any = importlib.import_module("torch.distributed._functional_collectives")

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
Change = Callable[[torch.Tensor], torch.Tensor]


def split_layer(layer: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split one decoder layer; with ``sequence_parallel`` norms and residual keep a part of the tokens."""
    gather, reduce = _exchanges(mesh, sequence_parallel)
    for name, part in layer.named_modules():
        # A head's norm (Qwen 3) sees this rank's heads; under sequence parallelism every norm sees its tokens.
        summed = sequence_parallel or name.endswith(("q_norm", "k_norm"))
        _place(part, mesh, SPLIT.get(name, WHOLE), summed=summed)
    for block in (layer.self_attn, layer.mlp):
        _change_input(block, gather)  # type: ignore[arg-type]
    for block, projection in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
        _change_output(getattr(block, projection), reduce)


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

    tokens.forward = _on_own_part(tokens, look_up, {"weight": COLUMNS})
    _change_input(head, gather)


def first_token(mesh: DeviceMesh, vocab_size: int) -> int:
    """First token of this rank's part of the vocabulary; the last ranks have fewer where they cannot be equal."""
    return mesh.get_local_rank() * -(-vocab_size // mesh.size())


def _place(module: nn.Module, mesh: DeviceMesh, placement: Placement, *, summed: bool) -> None:
    """Make the module's own parameters DTensors, and have its forward pass compute on this rank's part."""
    gradients: dict[str, Placement] = {}
    for name, parameter in module.named_parameters(recurse=False):
        is_row_bias = placement == ROWS and parameter.ndim == 1
        placed = WHOLE if is_row_bias else placement
        if not isinstance(parameter, DTensor):
            whole = distribute_tensor(parameter.data, mesh, [placed], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(whole))
        gradients[name] = Partial() if is_row_bias or (summed and placed == WHOLE) else placed
    if gradients:
        # The ranks' products are summed, and with them what each adds of the bias.
        share = mesh.size() if placement == ROWS else 1
        module.forward = _on_own_part(module, module.forward, gradients, bias_share=share)


def _on_own_part(
    module: nn.Module, forward: Callable[..., Any], gradients: dict[str, Placement], bias_share: int = 1
) -> Callable[..., Any]:
    def on_own_part(*arguments: Any, **settings: Any) -> Any:
        kept = dict(module._parameters)
        for name, gradient in gradients.items():
            parameter: Any = kept[name]
            own: Any = parameter.to_local(grad_placements=[gradient]) if isinstance(parameter, DTensor) else parameter
            module._parameters[name] = own / bias_share if name == "bias" and bias_share > 1 else own
        try:
            return forward(*arguments, **settings)
        finally:
            module._parameters.update(kept)

    return on_own_part


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
    if not sequence_parallel:
        return (lambda x: _SumGradient.apply(x, group)), (lambda x: _Sum.apply(x, group))  # type: ignore[no-untyped-call]
    return (
        lambda x: collectives.wait_tensor(collectives.all_gather_tensor_autograd(x, 1, group)),
        lambda x: collectives.wait_tensor(collectives.reduce_scatter_tensor_autograd(x, "sum", 1, group)),
    )


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # Not in place: selective checkpointing keeps the product that is summed.
    total: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))
    return total


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
