"""Arguments and results of ``evaluate``: the recipe, the hardware, a grid of configurations, and their estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from optimizer.hardware import Gpu, InstanceType, Interconnect, Precision

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
# One value for all configurations, or one for each.
Number = float | Floats
Flag = bool | Bools

# A Grid holds positions in these tuples, so that one array holds many settings.
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
CHECKPOINTINGS = ("none", "selective", "full")
DDP, ZERO1, ZERO2, ZERO3 = range(4)
NONE, SELECTIVE, FULL = range(3)

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor"]
Attention = Literal["flash", "unfused"]
ExpertsKind = Literal["grouped", "loop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of training that stay the same over a grid.

    Attributes:
        seq_len: tokens of one sequence; 1 for a CNN.
        precision: of the matrix products.
        optimizer: "adamw", "adam", "sgd" (with momentum) or "adafactor".
        attention: "flash" (fused, never stores the score matrix) or "unfused".
        compiled: torch.compile fuses element-wise operations.
        framework: a profile of data/frameworks.toml: bytes the training code keeps, and its host time.
        experts: a mixture's experts in one grouped kernel or in a loop; None for the framework's choice.
        shardings: the SHARDINGS that a search may use.
    """

    seq_len: int
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    attention: Attention = "flash"
    compiled: bool = False
    framework: str = "torch"
    experts: ExpertsKind | None = None
    shardings: tuple[str, ...] = SHARDINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One node.

    Attributes:
        gpu: the GPU model; of a fractional GPU, at its fraction's rates.
        gpus_per_node: ranks of one node.
        interconnect: the link between the GPUs of one node.
        network_gbit_per_s: bandwidth of one node, all cards together, one direction, Gbit/s.
        efa: the network is EFA or InfiniBand (kernel bypass); otherwise TCP.
        gpu_memory_gib: memory of one GPU, GiB; None for the GPU model's own (a fractional GPU has less).
    """

    gpu: Gpu
    gpus_per_node: int
    interconnect: Interconnect
    network_gbit_per_s: float
    efa: bool
    gpu_memory_gib: float | None = None

    @classmethod
    def from_instance_type(cls, instance: InstanceType) -> Self:
        """Build the hardware of an EC2 type; a fractional GPU computes and moves data at its fraction."""
        gpu = instance.gpu
        if instance.gpu_count < 1:
            gpu = replace(
                gpu,
                memory_bandwidth_gb_per_s=gpu.memory_bandwidth_gb_per_s * instance.gpu_count,
                peak_tflop_per_s={name: peak * instance.gpu_count for name, peak in gpu.peak_tflop_per_s.items()},
            )
        return cls(
            gpu=gpu,
            gpus_per_node=instance.ranks,
            interconnect=instance.interconnect,
            network_gbit_per_s=instance.network_gbit_per_s,
            efa=instance.efa_cards > 0,
            gpu_memory_gib=instance.gpu_memory_gib,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Configurations: arrays (or numbers) that broadcast against each other; a number is a grid of one.

    The GPUs used are data x tensor x pipeline x context, spread evenly over ``nodes``.

    Attributes:
        nodes: nodes.
        data, tensor, pipeline, context: ranks of each kind of parallelism.
        expert: ranks of expert parallelism, which divides ``data``: ``expert`` data-parallel ranks together hold each
            expert once (Megatron's expert-model-parallel size); with 1 every rank holds all experts.
        sequence_parallel: 1 where tensor parallelism also splits norms, dropout and residual (Megatron's sequence
            parallelism), else 0; None for the framework's choice.
        virtual_stages: model chunks of one pipeline rank (interleaved schedule); 1 is the plain 1F1B schedule.
        sharding: position in SHARDINGS.
        micro_batch: sequences (or images) of one forward pass on one data-parallel rank.
        grad_accum: forward passes of one optimizer step.
        checkpointing: position in CHECKPOINTINGS.
    """

    nodes: npt.ArrayLike
    data: npt.ArrayLike
    tensor: npt.ArrayLike = 1
    pipeline: npt.ArrayLike = 1
    context: npt.ArrayLike = 1
    expert: npt.ArrayLike = 1
    sequence_parallel: npt.ArrayLike | None = None
    virtual_stages: npt.ArrayLike = 1
    sharding: npt.ArrayLike = ZERO3
    micro_batch: npt.ArrayLike = 1
    grad_accum: npt.ArrayLike = 1
    checkpointing: npt.ArrayLike = NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Estimates of each configuration of a grid, all of the grid's shape.

    Attributes:
        step_time_s: one optimizer step, seconds.
        tokens_per_second: of the whole fleet; samples per second for a CNN.
        mfu: model FLOPs utilisation: useful FLOPs (no recomputation) over the precision's dense peak.
        peak_memory_gib: peak of the memory that a process allocates on the fullest rank, GiB.
        limit_gib: memory that a process may allocate: the GPU's less ``reserve_gib``, GiB.
        nccl_gib: buffers of NCCL's communicators, GiB.
        fits: peak_memory_gib <= limit_gib.
        memory_gib: GiB by part; the parts add up to peak_memory_gib.
        time_s: seconds by part; the parts add up to step_time_s.
    """

    step_time_s: Floats
    tokens_per_second: Floats
    mfu: Floats
    peak_memory_gib: Floats
    limit_gib: Floats
    nccl_gib: Floats
    fits: Bools
    memory_gib: dict[str, Floats]
    time_s: dict[str, Floats]
