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
        names, known = mesh.mesh_dim_names or (), {*DATA_DIMENSIONS, *SPLITS}
        if not names or not known.issuperset(names):
            raise ConfigurationError(
                f"the mesh has dimensions {list(names)}; name them {sorted(known)}: the data dimensions tell which "
                "ranks have samples of their own"
            )
        coordinate = mesh.get_coordinate()
        if mesh.size() != world_size or coordinate is None:
            raise ConfigurationError(f"the mesh has {mesh.size()} ranks and the run {world_size}: give the whole mesh")
        if "pp" in names and mesh.size(names.index("pp")) > 1:
            raise ConfigurationError(
                f"the mesh has {mesh.size(names.index('pp'))} pipeline stages, and no rank has the whole model: use a "
                "framework with pipeline parallelism (gpufleet launch-config), or a plan without it (gpufleet "
                "recommend --parallelism data,tensor)"
            )
        data_rank, data_size = 0, 1
        for name in DATA_DIMENSIONS:
            if name in names:
                dimension = names.index(name)
                data_rank = data_rank * mesh.size(dimension) + coordinate[dimension]
                data_size *= mesh.size(dimension)
        return cls(rank=data_rank, size=data_size)


def refuse_other_layout(model: nn.Module, optimizer: object, mesh: DeviceMesh | None, data_size: int) -> None:
    """Refuse a model laid out other than the plan, which says what fits into the GPUs' memory and what it costs."""
    plan = node_plan()
    if plan is None:
        return
    for dimension, field in SPLITS.items():
        planned: int = getattr(plan, field)
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        size = mesh.size(names.index(dimension)) if mesh is not None and dimension in names else 1
        if planned not in (1, size):
            raise ConfigurationError(
                f"the plan has {field} {planned}, and the mesh of this run has {size} {dimension} ranks. Give "
                f"SpotTolerantRun the plan's mesh (mesh=, with a dimension {dimension!r}), train with "
                "python -m bootstrap.trainer, or take a plan without it (gpufleet recommend --parallelism data)"
            )
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    is_sharded |= plan.sharding == "zero1" and is_zero_redundancy(optimizer)
    if plan.sharding != "ddp" and data_size > 1 and not is_sharded:
        raise ConfigurationError(
            f"the plan has sharding {plan.sharding}, and every rank holds the whole model and optimizer: its "
            "memory would not fit where the plan's does. Shard with fully_shard (FSDP2)"
            f"{' or ZeroRedundancyOptimizer' if plan.sharding == 'zero1' else ''}, train with "
            "python -m bootstrap.trainer, take a plan for replicas (gpufleet recommend --sharding ddp), or unset "
            f"{VARIABLE}"
        )
