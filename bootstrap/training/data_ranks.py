"""Ranks with samples of their own, and the plan's layout against the model's.

Mesh dimensions have torchtitan's names: ``dp_replicate`` and ``dp_shard`` are data dimensions; the ranks of one ``cp``,
``tp``, ``pp`` or ``ep`` group see the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bootstrap.contract.node_plan import VARIABLE
from bootstrap.training.environment import node_plan
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.optimizer_states import is_zero_redundancy

DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
# Fields of the plan by mesh dimension.
SPLITS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}


@dataclass(frozen=True, kw_only=True)
class DataRanks:
    """This rank's place among the ranks with samples of their own."""

    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, *, rank: int, world_size: int) -> DataRanks:
        """Place in ``mesh``; without one every rank has samples of its own."""
        if mesh is None:
            return cls(rank=rank, size=world_size)
        sizes, known = sizes_of(mesh), {*DATA_DIMENSIONS, *SPLITS}
        if not sizes or not known.issuperset(sizes):
            raise ConfigurationError(f"the mesh has dimensions {list(sizes)}; name them {sorted(known)}")
        coordinate = mesh.get_coordinate()
        if mesh.size() != world_size or coordinate is None:
            raise ConfigurationError(f"the mesh has {mesh.size()} ranks and the run {world_size}: give the whole mesh")
        if sizes.get("pp", 1) > 1:
            raise ConfigurationError(
                f"the mesh has {sizes['pp']} pipeline stages, and no rank has the whole model: use an engine with "
                "stages (gpufleet launch-config)"
            )
        data_rank, data_size = 0, 1
        for name in DATA_DIMENSIONS:
            if name in sizes:
                data_rank = data_rank * sizes[name] + coordinate[list(sizes).index(name)]
                data_size *= sizes[name]
        return cls(rank=data_rank, size=data_size)


def sizes_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Ranks by dimension, in the mesh's order."""
    return {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))


def refuse_other_layout(model: nn.Module, optimizer: object, mesh: DeviceMesh | None, data_size: int) -> None:
    """Refuse a model laid out other than the plan, which says what fits into the GPUs' memory and what it costs."""
    plan = node_plan()
    if plan is None:
        return
    for dimension, field in SPLITS.items():
        planned: int = getattr(plan, field)
        if planned not in (1, size := sizes_of(mesh).get(dimension, 1)):
            raise ConfigurationError(
                f"the plan has {field} {planned}, and the mesh of this run has {size} {dimension} ranks: give the "
                "plan's mesh, or take a plan without (gpufleet recommend --parallelism data)"
            )
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    is_sharded |= plan.sharding == "zero1" and is_zero_redundancy(optimizer)
    if plan.sharding != "ddp" and data_size > 1 and not is_sharded:
        raise ConfigurationError(
            f"the plan has sharding {plan.sharding}, and every rank holds the whole model and optimizer, which may not "
            "fit: shard with fully_shard (FSDP2; for zero1 ZeroRedundancyOptimizer), take replicas (gpufleet "
            f"recommend --sharding ddp), or unset {VARIABLE}"
        )
