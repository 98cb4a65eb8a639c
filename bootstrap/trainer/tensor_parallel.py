"""Tensor parallelism of Hugging Face's Llama-like decoders: torch's own styles, by module name.

Projections into heads and feed-forward units are split by columns, projections out of them by rows, embedding and
output by vocabulary. Every other parameter becomes a replicated DTensor, so that all are on one mesh: fused optimizer
steps take no mixture.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Replicated(ParallelStyle):
    """Whole module on each rank, with the same inputs: its parameters become replicated DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(each, mesh, (Replicate(),), run_check=False) for each in inputs)

        return distribute_module(module, device_mesh, input_fn=whole, output_fn=lambda _, output, __: output.to_local())


def split_layer(layer: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split one decoder layer; with ``sequence_parallel`` norms and residual keep a part of the tokens."""
    out = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence_parallel else Replicated()
    # A head's norm (Qwen 3) sees this rank's heads, so its gradient is summed over the ranks.
    by_head = SequenceParallel(sequence_dim=2, use_local_output=True)
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": by_head,
        "self_attn.k_norm": by_head,
        "self_attn.o_proj": RowwiseParallel(output_layouts=out),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=out),
    }
    if sequence_parallel:
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    names = {name for name, _ in layer.named_modules()}
    parallelize_module(layer, mesh, {name: style for name, style in plan.items() if name in names}, src_data_rank=None)


def split_ends(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split embedding and output projection by vocabulary; each rank gets the logits of its part."""
    out = Shard(1) if sequence_parallel else Replicate()
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=out),
        "model.norm": SequenceParallel(use_local_output=True) if sequence_parallel else Replicated(),
        "lm_head": ColwiseParallel(input_layouts=out, output_layouts=Shard(-1)),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
