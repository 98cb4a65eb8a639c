"""Out of GPU memory: the run starts again, once, with half the micro-batch and twice the accumulation.

The rank that runs out writes the smaller micro-batch beside the checkpoints and fails, so that torchrun starts all
ranks anew: a peer may wait for it in a collective that nothing else ends. Mathematics and global batch stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist

from bootstrap.trainer.config import TrainerConfig
from bootstrap.training.errors import AlreadyExistsError, TrainingError
from bootstrap.training.leaving import end_process
from bootstrap.training.stores import Store

logger = logging.getLogger(__name__)


class OutOfMemoryError(TrainingError):
    """GPU memory is too small for the smallest step that the trainer may choose."""


class MicroBatchLimit:
    """Largest micro-batch that an earlier start left; made and read on all ranks together.

    A start with another setting, of which most decide a step's memory, tries its own micro-batch.
    """

    def __init__(self, config: TrainerConfig, store: Store) -> None:
        self._store = store
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        # Nodes may have unlike numbers of GPUs.
        layout = repr((ranks, dataclasses.replace(config, gpus_per_node=0)))
        self._name = f"micro-batch/{hashlib.sha256(layout.encode()).hexdigest()[:16]}"
        box: list[int | None] = [None]
        if ranks == 1 or dist.get_rank() == 0:
            with contextlib.suppress(FileNotFoundError):
                box = [max(1, int(store.read(self._name)))]
        if ranks > 1:
            dist.broadcast_object_list(box)
        self.value = box[0]

    @contextlib.contextmanager
    def halving(self, config: TrainerConfig) -> Iterator[None]:
        """End the process for a smaller start when it runs out of memory; OutOfMemoryError where that cannot help."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = " ".join(str(error).split())[:300]
            if self.value is not None or config.micro_batch == 1:
                raise OutOfMemoryError(
                    f"out of GPU memory with micro-batch {config.micro_batch}. Try --activation-checkpointing full, "
                    "--sharding zero3 on several data ranks, a smaller --micro-batch, or a plan with more memory a GPU "
                    f"(gpufleet recommend --instance-type). {reason}"
                ) from error
            with contextlib.suppress(AlreadyExistsError):  # of another rank that ran out
                self._store.write(self._name, [str(config.micro_batch // 2).encode()])
            logger.warning(
                "out of GPU memory with micro-batch %d: the next start has at most %d and more accumulation; the "
                "global batch stays %d. %s", config.micro_batch, config.micro_batch // 2, config.global_batch, reason,
            )  # fmt: skip
            end_process(1)
