"""Exchanges among the ranks of a run, over a gloo group of their own, beside NCCL."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankGroup:
    """Ranks of this run; a dead peer fails an exchange at once, a hung one after ``timeout_s``."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def maximum(self, *values: int) -> list[int]:
        """Largest value over the ranks, for each of ``values``."""
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value by rank, on every rank."""
        if self._group is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return cast(list[T], values)
