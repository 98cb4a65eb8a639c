"""Arguments and results of an estimate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from bootstrap.contract.fine_tuning import FULL_TRAINING, FineTuning
from bootstrap.contract.trainer import loader_workers
from optimizer.contract.hardware import Gpu, InstanceType, Interconnect, Precision

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = TypeVar("Table", bound="DataclassInstance")
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Number = float | Floats
Flag = bool | Bools

# A Grid holds positions in these tuples.
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
CHECKPOINTINGS = ("none", "selective", "full")
DDP, ZERO1, ZERO2, ZERO3 = range(4)
NONE, SELECTIVE, FULL = range(3)

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit"]
# ``pure-bf16`` computes in bf16, and keeps parameters, gradients and moments in it too.
RecipePrecision = Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16", "fp8"]
Attention = Literal["flash", "unfused"]
Graphs = Literal["none", "part", "whole", "fused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of training that stay the same over a grid; ``seq_len`` is 1 where samples count.

    Attributes:
        precision: arithmetic of the products.
        scales_blocks: 8 bits with a scale for each 32 elements (MXFP8).
        flash2: attention in FlashAttention 2, whatever the code's kernel is today.
        pure: parameters, gradients and moments are in ``precision`` too.
        target_len: tokens of a decoder beside an encoder; 0 for the model's usual ones.
        recomputed: modules that Megatron's selective recomputation repeats: moe_act, layernorm, mla_up_proj.
        offloaded_layers: layers whose activations wait in the host's memory.
        optimizer_instances: groups of data ranks that each hold the whole optimizer state, in shards.
        fused_loss: Megatron's cross_entropy_loss_fusion.
        graphs: what NVIDIA's code replays as CUDA graphs: a part of a mixture's layers, the whole iteration, or that of
            a mixture whose experts are fused, whose exchange is hidden, and whose attention is in 8 bits.
        packed: samples of one sequence, which do not attend to each other.
        labelled: share of the tokens that have logits.
        loops_experts: a loop over the experts has no streams of grouped products; their time is taken as equal.
        samples_per_vcpu_s: samples a second that one loader process prepares; 0 for data that is there at no cost.
    """

    seq_len: int
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    attention: Attention = "flash"
    compiled: bool = False
    framework: str = "torch"
    scales_blocks: bool = False
    flash2: bool = False
    pure: bool = False
    tuning: FineTuning = FULL_TRAINING
    target_len: int = 0
    recomputed: tuple[str, ...] = ()
    offloaded_layers: int = 0
    optimizer_instances: int = 1
    fused_loss: bool = False
    packed: int = 1
    labelled: float = 1.0
    graphs: Graphs = "none"
    loops_experts: bool = False
    samples_per_vcpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One node.

    Attributes:
        network_gbit_per_s: one direction.
        efa: EFA or InfiniBand, not TCP.
        gpudirect: the network reads and writes GPU memory; False without EFA.
        loader_workers: processes that prepare samples for one GPU; 0 where the host is not known.
    """

    gpu: Gpu
    gpus_per_node: int
    interconnect: Interconnect
    network_gbit_per_s: float
    efa: bool
    gpudirect: bool
    loader_workers: int = 0

    @classmethod
    def from_instance_type(cls, instance: InstanceType) -> Self:
        """Build the hardware of an EC2 type; a fractional GPU has its fraction of the rates."""
        gpu = replace(instance.gpu, memory_gib=instance.gpu_memory_gib)
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
            gpudirect=instance.gpudirect,
            loader_workers=loader_workers(instance.vcpus, instance.ranks),
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Configurations: arrays (or numbers) that broadcast against each other.

    Attributes:
        data, tensor, pipeline, context: ranks, spread evenly over ``nodes``.
        expert: data-parallel ranks that together hold each expert once.
        sequence_parallel: None for the framework's choice.
        virtual_stages: model chunks of one pipeline rank; 1 is plain 1F1B.
        sharding, checkpointing: positions in SHARDINGS and CHECKPOINTINGS.
        micro_batch: sequences (or images) a forward pass of one data-parallel rank.
        grad_accum: forward passes of one optimizer step.
    """

    nodes: Any
    data: Any
    tensor: Any = 1
    pipeline: Any = 1
    context: Any = 1
    expert: Any = 1
    sequence_parallel: Any = None
    virtual_stages: Any = 1
    sharding: Any = ZERO3
    micro_batch: Any = 1
    grad_accum: Any = 1
    checkpointing: Any = NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Estimates of each configuration; ``tokens_per_second`` is the fleet's, in samples for a CNN.

    Plans need ``fits_p95``. Where only the expected peak ``fits``, measured runs did. ``reserve_gib`` is what the GPU
    must have beyond the peak.
    """

    step_time_s: Floats
    tokens_per_second: Floats
    mfu: Floats
    peak_memory_gib: Floats
    p95_memory_gib: Floats
    limit_gib: Floats
    memory_gib: dict[str, Floats]
    reserve_gib: dict[str, Floats]
    time_s: dict[str, Floats]

    @property
    def fits(self) -> Bools:
        """True where the expected peak is within the limit."""
        return np.asarray(self.peak_memory_gib <= self.limit_gib)

    @property
    def fits_p95(self) -> Bools:
        """True where the 95th percentile of the peak is within the limit."""
        return np.asarray(self.p95_memory_gib <= self.limit_gib)

    @property
    def fit(self) -> npt.NDArray[np.str_]:
        """``fits`` at p95, ``may not fit`` where only the expected peak does, or ``does not fit``."""
        return np.where(self.fits_p95, "fits", np.where(self.fits, "may not fit", "does not fit"))


def take_rows(table: Table, index: Any) -> Table:
    """The rows of a table, a dataclass of arrays of one length, at an index, a slice, an array of indices or a mask."""
    return replace(table, **{field.name: getattr(table, field.name)[index] for field in fields(table)})
