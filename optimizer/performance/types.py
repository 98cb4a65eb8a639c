"""What ``evaluate`` takes and gives: the recipe, the hardware, a grid of configurations, and the estimates for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from optimizer.hardware import Gpu, Interconnect, Precision

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# A Grid holds the position in these tuples, so that one array holds many settings.
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
CHECKPOINTINGS = ("none", "selective", "full")
DDP, ZERO1, ZERO2, ZERO3 = range(4)
NONE, SELECTIVE, FULL = range(3)

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor"]
Attention = Literal["flash", "unfused"]
ExpertsKind = Literal["grouped", "loop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What stays the same over a grid.

    Attributes:
        seq_len: tokens of one sequence; 1 for a CNN.
        precision: of the matrix products.
        optimizer: "adamw", "adam", "sgd" (with momentum) or "adafactor".
        attention: "flash" (fused, never stores the score matrix) or "unfused".
        compiled: element-wise operations are fused by a compiler (torch.compile).
        framework: a profile of data/frameworks.toml: what the training code keeps in memory and costs the host.
        experts: how it computes a mixture's experts: one grouped kernel, or a loop; None for what the framework does.
        shardings: of SHARDINGS, those that a search may use.
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
    """One node type.

    Attributes:
        gpu: the GPU model.
        gpus_per_node: ranks of one node.
        interconnect: how the GPUs of one node are linked.
        network_gbit_per_s: bandwidth of one node, all cards together, one direction, Gbit/s.
        efa: the network is EFA or InfiniBand (kernel bypass); otherwise TCP.
        gpu_memory_gib: memory of one GPU, GiB; None for the GPU's own (a fractional GPU has less).
    """

    gpu: Gpu
    gpus_per_node: int
    interconnect: Interconnect
    network_gbit_per_s: float
    efa: bool
    gpu_memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Configurations: arrays (or numbers) that broadcast against each other; a number is a grid of one.

    The GPUs used are data x tensor x pipeline x context; ``nodes`` says over how many nodes they are spread evenly.

    Attributes:
        nodes: nodes.
        data, tensor, pipeline, context: ranks of each kind of parallelism.
        expert: ranks of expert parallelism, which divides ``data``: ``expert`` data-parallel ranks together hold each
            expert once (Megatron's expert-model-parallel size); with 1 every rank holds all experts.
        sequence_parallel: 1 where tensor parallelism also splits norms, dropout and residual (Megatron's sequence
            parallelism), 0 where not; None for what the framework does.
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
    """Estimates for each configuration of a grid, all of the grid's shape.

    Attributes:
        step_time_s: one optimizer step, seconds.
        tokens_per_second: of the whole fleet; samples per second for a CNN.
        mfu: model FLOPs utilisation: useful FLOPs (no recomputation) over the precision's dense peak.
        peak_memory_gib: peak of the memory a process allocates on the fullest rank, GiB.
        limit_gib: what a process may allocate: the GPU's memory less what it must have beyond (``reserve_gib``), GiB.
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
