"""DeviceMesh of a layout, with torchtitan's dimension names.

dp_replicate: ranks with samples of their own and whole states. dp_shard: ranks with samples of their own and a part
of the states. cp: ranks that split each sequence; they share the states out with dp_shard. tp: ranks that split each
layer.
"""

from __future__ import annotations

import dataclasses

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bootstrap.trainer.config import TrainerConfig
from bootstrap.training.errors import ConfigurationError

# Ranks that share the states out, where context parallelism is on.
SHARDED = "dp_shard_cp"


def build_mesh(config: TrainerConfig, *, world_size: int, device_type: str) -> DeviceMesh:
    """Build the mesh (dp_replicate, dp_shard, cp, tp), tensor ranks next to each other; collective."""
    split = config.tensor_parallel * config.context_parallel
    if world_size % split:
        raise ConfigurationError(
            f"{world_size} ranks, and tensor {config.tensor_parallel} × context {config.context_parallel} ranks have "
            f"the same samples: start a multiple of {split} (torchrun --nproc-per-node, --nnodes)"
        )
    data = world_size // split
    shape = (data, 1) if config.sharding == "ddp" else (1, data)
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh(
        device_type, (*shape, config.context_parallel, config.tensor_parallel), mesh_dim_names=names
    )
    if config.context_parallel > 1:
        mesh["dp_shard", "cp"]._flatten(SHARDED)
    return mesh


def data_size(mesh: DeviceMesh) -> int:
    """Ranks with samples of their own."""
    return mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def data_rank(mesh: DeviceMesh) -> int:
    """Number of this rank's samples among those of all data ranks."""
    return mesh["dp_replicate"].get_local_rank() * mesh["dp_shard"].size() + mesh["dp_shard"].get_local_rank()


def with_batches(config: TrainerConfig, data_ranks: int, *, micro_batch_limit: int | None) -> TrainerConfig:
    """Fill in global batch and accumulation for the data ranks there are; the global batch stays the plan's.

    Raises:
        ConfigurationError: the global batch is no multiple of the data ranks; there is nothing to balance.
    """
    total = config.global_batch or data_ranks * config.micro_batch * config.grad_accum
    if total % data_ranks:
        raise ConfigurationError(
            f"--global-batch is {total}, which {data_ranks} data ranks do not divide; give a multiple of {data_ranks}"
        )
    each = total // data_ranks
    micro = next(
        size for size in range(min(config.micro_batch, micro_batch_limit or each, each), 0, -1) if each % size == 0
    )
    if config.balance == "measured" and each == micro:
        raise ConfigurationError(
            "--balance measured moves whole micro-batches between ranks and times those that do not reduce gradients, "
            f"and a rank has one micro-batch of {micro} samples: give a smaller --micro-batch, at most half of a "
            "rank's samples"
        )
    return dataclasses.replace(config, global_batch=total, micro_batch=micro, grad_accum=each // micro)
