"""Division of the state over the ranks' files, by torch.distributed.checkpoint's planner.

Each rank offers write items for the parts that it holds; rank 0 removes duplicates and spreads them evenly. Parts are
offered in pieces along their first dimension, so that replicas are divided too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from bootstrap.training.rank_group import RankGroup
from bootstrap.training.tensors import Geometry

# Pieces of this size: small enough to read in parallel and to verify alone, large enough for few index entries.
PIECE_BYTES = 64 * 2**20
# Smaller replicated tensors are not divided.
WHOLE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of a tensor in a file: ``sizes`` elements from ``offsets`` of the whole tensor, at byte ``at``."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def bytes(self) -> int:
        """Size."""
        return math.prod(self.sizes) * self.dtype.itemsize


class Planner(DefaultSavePlanner):
    """DCP's planner over geometries instead of tensors, so that a plan can be made before the tensors exist."""

    def __init__(self, geometries: Mapping[str, Geometry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._geometries = geometries

    def create_local_plan(self) -> SavePlan:
        """Write items for the pieces of this rank's parts."""
        items = [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=geometry.dtype), size=torch.Size(geometry.shape)
                ),
            )
            for key, geometry in self._geometries.items()
            for chunk in pieces_of(geometry)
        ]
        self.plan = SavePlan(items)
        return self.plan


def pieces_of(geometry: Geometry) -> list[ChunkStorageMetadata]:
    """Chunks of a part along its first dimension: about 1 to 64 MiB each, and of large replicas one or more a rank."""
    if not geometry.bytes:  # no index entry for an empty part of a tensor that others hold
        return [] if math.prod(geometry.shape) else [geometry.chunk]
    rows = geometry.sizes[0] if geometry.sizes else 1
    wanted = math.ceil(math.ceil(geometry.bytes / PIECE_BYTES) / geometry.replicas) * geometry.replicas
    count = min(rows, wanted, math.ceil(geometry.bytes / WHOLE_BYTES))
    if count == 1:
        return [geometry.chunk]
    edges = [rows * number // count for number in range(count + 1)]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size((geometry.offsets[0] + first, *geometry.offsets[1:])),
            sizes=torch.Size((last - first, *geometry.sizes[1:])),
        )
        for first, last in itertools.pairwise(edges)
    ]


def plan_files(geometries: Mapping[str, Geometry], ranks: RankGroup) -> Sequence[Sequence[Piece]]:
    """Pieces of each rank's file, in its order; every rank calls it with its own parts."""
    planner = Planner(geometries)
    offered = ranks.gather_to_first(planner.create_local_plan())
    files = [_placed(plan) for plan in planner.create_global_plan(offered)[0]] if ranks.rank == 0 else []
    return ranks.broadcast(files)


def _placed(plan: SavePlan) -> tuple[Piece, ...]:
    """Pieces in the file's order: by falling element size, so that each is aligned without gaps."""
    pieces, at = [], 0
    items = [(item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None]
    for key, data in sorted(items, key=lambda pair: -pair[1].properties.dtype.itemsize):
        piece = Piece(
            key=key,
            offsets=tuple(data.chunk.offsets),
            sizes=tuple(data.chunk.sizes),
            dtype=data.properties.dtype,
            shape=tuple(data.size),
            at=at,
        )
        pieces.append(piece)
        at += piece.bytes
    return tuple(pieces)
