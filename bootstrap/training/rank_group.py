"""Exchanges among the ranks of a run, over a gloo group of their own, beside NCCL; when the ranks agree."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from bootstrap.training.environment import positive_number
from bootstrap.training.errors import ConfigurationError

T = TypeVar("T")
logger = logging.getLogger(__name__)
# torchrun's variable: "1" gives each round of workers a store of its own.
OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# An exchange costs 0.4 to 0.6 ms of host time, so one in this time costs 0.06%; and a notice waits at most ten steps,
# should they become slow.
INTERVAL_MS = 1000
# While a checkpoint waits for all ranks' word that their files are written, and then the manifest.
SAVING_INTERVAL_MS = 250
MOST_STEPS = 10


class RankGroup:
    """Ranks of this run; a dead peer fails an exchange at once, a hung one after ``timeout_s``."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if is_shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and self.rank == 0:
                logger.warning(
                    "a restart by this torchrun would find the addresses of these processes, and fail: start it with "
                    "--standalone or --rdzv-backend c10d, and %s=1 or as python -m bootstrap.training.torchrun",
                    OWN_STORE_VARIABLE,
                )
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        elif (ranks := positive_number("WORLD_SIZE", "a count") or 1) > 1:
            raise ConfigurationError(
                f"this is one of {ranks:.0f} ranks, and torch.distributed is not initialised: each would train alone, "
                "into one store. First call torch.distributed.init_process_group(), and wrap the model (DDP, FSDP2)"
            )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._refuse_one_node_of_several()

    def _refuse_one_node_of_several(self) -> None:
        """Refuse ranks that all run on this node of a gang, as of mp.spawn: no variable tells the agent of them."""
        nodes, slots = (positive_number(f"GPUFLEET_{name}", "a count") or 1 for name in ("NODE_COUNT", "GPUS_PER_NODE"))
        if nodes > 1 and self.world_size < nodes * slots and len(set(self.gather(socket.gethostname()))) == 1:
            raise ConfigurationError(
                f"all {self.world_size} ranks of this training run on one of {nodes:.0f} nodes: each would train by "
                "itself, into one store. Give the script alone, which the nodes start under torchrun (docs/engines.md)"
            )

    def close(self) -> None:
        """Leave the group and end its threads; for a rank whose exchanges are all over.

        A gloo thread may hold the tensors of a finished exchange for a moment. One that frees them while Python shuts
        down aborts the process (SIGABRT; https://github.com/pytorch/pytorch/issues/190489), and torchrun takes a run
        that is done for a failed one.
        """
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def maximum(self, *values: int) -> list[int]:
        """Largest value over the ranks, for each of ``values``."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
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

    def gather_to_first(self, value: T) -> list[T]:
        """Every rank's value by rank, on rank 0; nothing on the others."""
        if self._group is None:
            return [value]
        values: list[T | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return cast(list[T], values or [])

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` with ``source``'s: over the default group on a GPU, over gloo on the CPU."""
        if self._group is not None:
            dist.broadcast(tensor, src=source, group=None if tensor.is_cuda else self._group)


@dataclass
class Agreement:
    """Largest value of each flag over the ranks, once a second or after ``every`` steps; all ranks ask after each step.

    ``saving``: a checkpoint is pending, at the same steps on every rank.
    """

    ranks: RankGroup
    flags: Callable[[], tuple[int, ...]]
    every: int | None
    saving: Callable[[], bool] = lambda: False
    _last: float = field(default_factory=time.monotonic)
    _steps: int = 0
    _slowest_ms: int = INTERVAL_MS

    def exchange(self, *, now: bool) -> list[int] | None:
        """Agreed values of the flags; None where no exchange is due. ``now``: in any case."""
        self._steps += 1
        if not now and self._steps < self._cadence():
            return None
        step_ms = int((time.monotonic() - self._last) * 1000 / self._steps)
        # The same on all ranks, which therefore go on in the same way.
        *flags, self._slowest_ms = self.ranks.maximum(*self.flags(), step_ms)
        self._last, self._steps = time.monotonic(), 0
        return flags

    def _cadence(self) -> int:
        """Steps between two exchanges, the same on all ranks. One process alone has nobody to wait for."""
        if self.every is not None or self.ranks.world_size == 1:
            return self.every or 1
        interval_ms = SAVING_INTERVAL_MS if self.saving() else INTERVAL_MS
        return max(1, min(MOST_STEPS, interval_ms // max(1, self._slowest_ms)))
