"""What the ranks tell each other outside the gradients: agreement on the step to stop or save at.

Everything here goes over a gloo group of its own, on the CPU and the network, so that it works when the training
group is NCCL and never mixes with its traffic. One exchange is an all-reduce of three 64-bit integers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


class Control:
    """Ranks of this run; a single process without ``torch.distributed`` is a run of one rank.

    Args:
        timeout_s: limit of one exchange; a peer that is gone fails it at once, one that hangs fails it after this.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def maximum(self, values: list[int]) -> list[int]:
        """Largest of each value over the ranks."""
        if self._group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def from_first(self, value: T) -> T:
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
        boxes: list[T | None] = [None] * self.world_size
        dist.all_gather_object(boxes, value, group=self._group)
        return cast(list[T], boxes)
