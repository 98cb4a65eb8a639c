"""Layout carried out on a model, in torchtitan's order: splits, activation checkpointing, compile, data ranks."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bootstrap.trainer.adapters import quantize
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.context_parallel import split_context
from bootstrap.trainer.mesh import SHARDED
from bootstrap.trainer.models import blocks, materialise
from bootstrap.trainer.recompute import keeping
from bootstrap.trainer.tensor_parallel import split_ends, split_layer
from bootstrap.trainer.weights import load_weights

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
dynamo: Any = importlib.import_module("torch._dynamo")  # its configuration has no types
# Compiled layers keep the outputs of these products, attentions and exchanges; recompute.py lists the eager layers'.
_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def parallelize(
    model: nn.Module, config: TrainerConfig, mesh: DeviceMesh, device: torch.device, weights: str = ""
) -> nn.Module:
    """Put ``model`` on ``device`` in the configuration's layout; collective.

    ``weights``: values that 4-bit projections are made of, if any; the caller loads the others.
    """
    if config.family == "cnn":
        # FSDP2 takes contiguous parameters only.
        ordered = torch.contiguous_format if shards(config, mesh) else torch.channels_last
        model = model.to(device, memory_format=ordered)  # type: ignore[call-overload]
        layers: list[nn.Module] = [part for part in model.children() if any(True for _ in part.parameters())]
        if config.compiled:
            model.compile()
    else:
        layers = _prepare_transformer(model, config, mesh, device, weights)
    if not shards(config, mesh):
        return _replicate(model, config, mesh)
    _shard(model, layers, config, mesh)
    return model


def shards(config: TrainerConfig, mesh: DeviceMesh) -> bool:
    """True where FSDP2 holds the parameters; otherwise DDP, or one rank alone, under autocast."""
    ranks = mesh.size() // mesh["tp"].size()
    return config.tensor_parallel > 1 or (config.sharding != "ddp" and ranks > 1)


def autocasts(config: TrainerConfig, mesh: DeviceMesh) -> bool:
    """True where autocast, and not FSDP2's policy, casts to 16 bits."""
    # Batch norms keep 32-bit parameters.
    return config.precision in HALF and (config.family == "cnn" or not shards(config, mesh))


def _prepare_transformer(
    model: Any, config: TrainerConfig, mesh: DeviceMesh, device: torch.device, weights: str
) -> list[nn.Module]:
    """Make, split, checkpoint and compile layer by layer; returns the layers."""
    if config.context_parallel > 1:
        split_context(model, mesh.get_group("cp"))
    if config.tensor_parallel > 1:
        # A split module's forward pass replaces its parameters for a while (_on_own_part). By default the compiler
        # leaves a checkpointed layer with such a side effect uncompiled. The recomputation does not need the effect.
        dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    in_shards = shards(config, mesh) and config.sharding != "ddp"
    layers = blocks(model)
    for number, layer in enumerate(layers):
        materialise(model, layer, device=device, seed=config.seed)
        if config.tuning.four_bit:  # before the next layer is made: the 16-bit base need not fit
            if weights:
                load_weights(model, weights, within=layer)
            quantize(layer, device)
        if config.tensor_parallel > 1:
            split_layer(layer, mesh["tp"], sequence_parallel=config.sequence_parallel)
        layers[number] = _checkpointed(layer, config, model.config)
        if config.compiled:
            layers[number].compile()
        if in_shards:  # before the next layer is made: the whole model need not fit
            _fully_shard(layers[number], config, mesh, last=number == len(layers) - 1)
    materialise(model, model, device=device, seed=config.seed)
    if config.tensor_parallel > 1:
        split_ends(model, mesh["tp"], sequence_parallel=config.sequence_parallel)
    return list(layers)


def _checkpointed(layer: nn.Module, config: TrainerConfig, settings: Any) -> nn.Module:
    if config.activation_checkpointing == "none":
        return layer
    keep: dict[str, Any] = {}
    if config.activation_checkpointing == "selective":
        # The layer's last product is not kept: recomputation stops at the last tensor that is needed.
        last = settings.hidden_size, getattr(settings, "intermediate_size", 0) // config.tensor_parallel
        rank = config.tuning.lora_rank if config.tuning.adapts else 0
        keep["context_fn"] = partial(_compiled_contexts if config.compiled else keeping, last, rank)
    return checkpoint_wrapper(layer, preserve_rng_state=_drops(layer), **keep)


def _compiled_contexts(last: tuple[int, int], rank: int) -> Any:
    """Return torch's own contexts: the compiler takes no others, and asks for them once."""

    def policy(_: Any, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
        again = operation == _aten.mm.default and (arguments[1].shape == last[::-1] or arguments[1].shape[0] == rank)
        return CheckpointPolicy.MUST_SAVE if operation in KEPT and not again else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _drops(layer: nn.Module) -> bool:
    # Attention drops by a function, at a rate that its module holds (Llama's attention_dropout).
    rates = [value for part in layer.modules() for name, value in vars(part).items() if "drop" in name]
    rates += [part.p for part in layer.modules() if isinstance(part, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _replicate(model: nn.Module, config: TrainerConfig, mesh: DeviceMesh) -> nn.Module:
    if mesh.size() == 1:
        return model
    if config.family != "cnn":
        # By default torch.compile cuts a layer where a bucket ends: the parts keep what the whole layer computes again.
        dynamo.config.optimize_ddp = False
    return DistributedDataParallel(
        model,
        # With this view ResNet-50 reaches 98.7% of linear scaling on four H100, not 97.0%, BERT-large 94.4%, not 89.6%.
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        # Accumulation skips the reduction that a static graph is recorded in.
        static_graph=config.grad_accum == 1,
    )


def _policy(config: TrainerConfig) -> MixedPrecisionPolicy:
    half = None if config.family == "cnn" else HALF.get(config.precision)
    return MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)


def _fully_shard(module: nn.Module, config: TrainerConfig, mesh: DeviceMesh, *, last: bool = False) -> None:
    # The backward pass begins with the last module, which therefore stays gathered.
    again = config.sharding == "zero3" and not last
    sharded = mesh[SHARDED] if config.context_parallel > 1 else mesh["dp_shard"]
    fully_shard(module, mesh=sharded, mp_policy=_policy(config), reshard_after_forward=again)


def _shard(model: Any, layers: list[nn.Module], config: TrainerConfig, mesh: DeviceMesh) -> None:
    groups = list(layers) if config.family == "cnn" else []
    if config.family in ("decoder", "encoder"):
        # In the root they would be gathered, and their gradients held, throughout a step.
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        if ends[0].weight is not ends[1].weight:
            groups += ends
    if config.sharding != "ddp":
        for module in groups:
            _fully_shard(module, config, mesh, last=module is groups[-1])
        _fully_shard(model, config, mesh)
        return
    # Replicas of tensor ranks: DistributedDataParallel takes no DTensor.
    whole = mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    for module in [*(layers if config.family != "cnn" else []), *groups, model]:
        replicate(module, mesh=whole, mp_policy=_policy(config))
