"""Index of a checkpoint: where in which rank's file each tensor's chunks lie, with their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from bootstrap.training.planning import Piece


class Extent(NamedTuple):
    """Bytes of a rank's file that have one checksum; in the manifest a list of these."""

    file: int
    at: int
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Tensor of a checkpoint, with the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def metadata(self) -> TensorStorageMetadata:
        """The same in DCP's terms, for its resharding."""
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in self.chunks
        ]
        return TensorStorageMetadata(TensorProperties(dtype=self.dtype), torch.Size(self.shape), chunks)


@dataclass(frozen=True, kw_only=True)
class Index:
    """Tensors by key, and the extent of each rank's plain values."""

    tensors: dict[str, SavedTensor]
    values: tuple[Extent, ...]

    def extents(self) -> Iterator[Extent]:
        """Every extent: together they are every byte of the files."""
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                yield chunk.extent
        yield from self.values

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(extent.bytes for extent in self.extents())

    @classmethod
    def of(
        cls, files: Sequence[Sequence[Piece]], checksums: Sequence[Sequence[str]], values: Sequence[Extent]
    ) -> Index:
        """Index of files with these pieces, and their checksums in the same order."""
        chunks: dict[str, tuple[Piece, list[Chunk]]] = {}
        for file, (pieces, sums) in enumerate(zip(files, checksums, strict=True)):
            for piece, checksum in zip(pieces, sums, strict=True):
                extent = Extent(file=file, at=piece.at, bytes=piece.bytes, checksum=checksum)
                chunk = Chunk(offsets=piece.offsets, sizes=piece.sizes, extent=extent)
                chunks.setdefault(piece.key, (piece, []))[1].append(chunk)
        tensors = {
            key: SavedTensor(dtype=piece.dtype, shape=piece.shape, chunks=tuple(own))
            for key, (piece, own) in chunks.items()
        }
        return cls(tensors=tensors, values=tuple(values))

    def to_json(self) -> dict[str, Any]:
        """Plain form: a chunk is [offsets, sizes, file, byte, bytes, checksum]."""
        return {
            "tensors": {
                key: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": tensor.shape,
                    "chunks": [[chunk.offsets, chunk.sizes, *chunk.extent] for chunk in tensor.chunks],
                }
                for key, tensor in self.tensors.items()
            },
            "values": self.values,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Index:
        """Read ``to_json``; ValueError, KeyError or TypeError for anything else."""
        tensors = {}
        for key, tensor in document["tensors"].items():
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key} has dtype {tensor['dtype']!r}")
            chunks = tuple(
                Chunk(offsets=tuple(offsets), sizes=tuple(sizes), extent=Extent(*row))
                for offsets, sizes, *row in tensor["chunks"]
            )
            tensors[key] = SavedTensor(dtype=dtype, shape=tuple(tensor["shape"]), chunks=chunks)
        return cls(tensors=tensors, values=tuple(Extent(*row) for row in document["values"]))
