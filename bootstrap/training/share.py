"""Share of a rank in every checkpoint: which bytes, copied where, in which order in its file."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from bootstrap.training.data_ranks import DataRanks
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.host_buffer import allocate, memory_of, open_kept, refuse_too_large
from bootstrap.training.planning import Piece, plan_files
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.stager import Stager
from bootstrap.training.state import StateSnapshot, TrainingState, random_state
from bootstrap.training.stores import Store
from bootstrap.training.tensors import Geometry, local_part

logger = logging.getLogger(__name__)


class Share:
    """Copies of this rank's share to host memory. All ranks call the same methods in the same order."""

    def __init__(self, state: TrainingState, ranks: RankGroup, data_ranks: DataRanks, store: Store) -> None:
        self._state, self._ranks, self._data_ranks, self._store = state, ranks, data_ranks, store
        self._geometries: dict[str, Geometry] = {}
        self.files: Sequence[Sequence[Piece]] = ()
        """Pieces of every rank's file."""
        self._pieces: Sequence[Piece] = ()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []
        self.stager = Stager(state.device, state.steppers)

    def prepare(self) -> None:
        """Plan and allocate for the states that the first step will make; ConfigurationError where memory lacks."""
        self._state.resolve()
        by_rank = self._ranks.gather(sorted({*self._state.parts, *self._state.optimizers}))
        if different := [rank for rank, names in enumerate(by_rank) if names != by_rank[0]]:
            raise ConfigurationError(
                f"rank 0 has {by_rank[0]} and rank {different[0]} {by_rank[different[0]]}: no resume could take that; "
                "give every rank the same scheduler, scaler and extra"
            )
        self._replan(self._state.expected())

    def begin_copy(self) -> dict[str, Any]:
        """Begin to copy this rank's share, by ``stager``; returns the plain values, copied."""
        snapshot = self._state.snapshot()
        tensors = {**snapshot.later, **snapshot.now}
        parts = {key: local_part(tensor) for key, tensor in tensors.items()}
        geometries = self._checked(tensors, parts)
        if self._ranks.maximum(int(geometries != self._geometries))[0]:
            logger.info("the state's structure changed: planning the checkpoint anew")
            self._replan(geometries)
        self._copy(snapshot, parts)
        changes = self._state.changes()
        self._state.warn(changes)
        return {
            "parts": snapshot.values,
            "changes": changes,
            "random": random_state(self._state.device),
            "data_rank": astuple(self._data_ranks),
        }

    @property
    def memory(self) -> memoryview:
        """Bytes of this rank's tensors, as in its file."""
        return memory_of(self.buffer)[: sum(piece.bytes for piece in self._pieces)]

    def pieces(self) -> list[memoryview]:
        """Bytes of each planned piece."""
        memory = self.memory
        return [memory[piece.at : piece.at + piece.bytes] for piece in self._pieces]

    def _checked(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> dict[str, Geometry]:
        """Geometries, known ones without computing them again."""
        geometries, changed = {}, {}
        for key, tensor in tensors.items():
            known, form = self._geometries.get(key), (tensor.shape, tensor.dtype, parts[key].shape)
            if known and parts[key].layout is torch.strided and form == (known.shape, known.dtype, known.sizes):
                geometries[key] = known
            else:
                changed[key] = tensor
        return geometries | self._state.geometries(changed)

    def _replan(self, geometries: dict[str, Geometry]) -> None:
        self._geometries = geometries
        self.files = plan_files(geometries, self._ranks)
        self._pieces = self.files[self._ranks.rank]
        size = sum(piece.bytes for piece in self._pieces)
        grows = size > self.buffer.nbytes
        if grows:  # what torchrun keeps grows with the state: a second memory beside it would stay for good
            self._views, self.buffer = [], torch.empty(0, dtype=torch.uint8)
        kept = open_kept() if grows else -1
        any_grows, needed = self._ranks.maximum(int(grows), size)
        if any_grows:
            ranks = self._ranks
            own = slice(ranks.rank - ranks.local_rank, ranks.rank - ranks.local_rank + ranks.local_world_size)
            refuse_too_large(
                needed,
                local_ranks=ranks.local_world_size,
                other_bytes=self._store.buffer_bytes,
                held=sum(ranks.gather(0 if kept == -1 else os.fstat(kept).st_blocks * 512)[own]),
            )
            self._ranks.maximum(0)  # no rank takes memory that another has not counted yet
            if grows:
                self.buffer = allocate(size, kept, pinned=self._state.device.type == "cuda")
        self._views = [
            self.buffer[piece.at : piece.at + piece.bytes].view(piece.dtype).view(piece.sizes) for piece in self._pieces
        ]

    def _copy(self, snapshot: StateSnapshot, parts: Mapping[str, torch.Tensor]) -> None:
        later, now = [], []
        guarded = {}
        for piece, view in zip(self._pieces, self._views, strict=True):
            source = parts[piece.key]
            if source.shape != view.shape:
                first = piece.offsets[0] - self._geometries[piece.key].offsets[0]
                source = source[first : first + piece.sizes[0]]
            if piece.key in snapshot.later:
                later.append((view, source))
                guarded[piece.key] = snapshot.later[piece.key]
            else:
                now.append((view, source))
        self.stager.begin(later, now, list(guarded.values()))
