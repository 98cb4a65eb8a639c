"""Index of a checkpoint: where in which rank's file each tensor's chunks lie, with their checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from bootstrap.training.planning import Piece


class Chunk(NamedTuple):
    """Part of a tensor, and its bytes in a rank's file, which have one checksum; plain values have no part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    at: int
    bytes: int
    checksum: str


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
    """Tensors by key, and the place of each rank's plain values."""

    tensors: dict[str, SavedTensor]
    values: tuple[Chunk, ...]

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk: together they are every byte of the files."""
        for tensor in self.tensors.values():
            yield from tensor.chunks
        yield from self.values

    @classmethod
    def of(cls, files: Sequence[Sequence[Piece]], checksums: Sequence[Sequence[str]], values: Sequence[Chunk]) -> Index:
        """Index of files with these pieces, and their checksums in the same order."""
        chunks: dict[str, tuple[Piece, list[Chunk]]] = {}
        for file, (pieces, sums) in enumerate(zip(files, checksums, strict=True)):
            for piece, checksum in zip(pieces, sums, strict=True):
                chunk = Chunk(piece.offsets, piece.sizes, file, piece.at, piece.bytes, checksum)
                chunks.setdefault(piece.key, (piece, []))[1].append(chunk)
        tensors = {
            key: SavedTensor(dtype=piece.dtype, shape=piece.shape, chunks=tuple(own))
            for key, (piece, own) in chunks.items()
        }
        return cls(tensors=tensors, values=tuple(values))

    def to_json(self) -> dict[str, Any]:
        """Plain form: a chunk is [offsets, sizes, file, byte, bytes, checksum], values without the first two."""
        return {
            "tensors": {
                key: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": tensor.shape,
                    "chunks": tensor.chunks,
                }
                for key, tensor in self.tensors.items()
            },
            "values": [chunk[2:] for chunk in self.values],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Index:
        """Read ``to_json``; ValueError, KeyError or TypeError for anything else."""
        tensors = {}
        for key, tensor in document["tensors"].items():
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key} has dtype {tensor['dtype']!r}")
            chunks = tuple(Chunk(tuple(offsets), tuple(sizes), *row) for offsets, sizes, *row in tensor["chunks"])
            tensors[key] = SavedTensor(dtype=dtype, shape=tuple(tensor["shape"]), chunks=chunks)
        return cls(tensors=tensors, values=tuple(Chunk((), (), *row) for row in document["values"]))
