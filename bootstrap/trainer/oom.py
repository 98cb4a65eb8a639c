"""Out of GPU memory: all ranks start anew, once, with half the micro-batch and twice the accumulation.

One rank may run out while the others wait for it in a collective that nothing ends. So every process replaces itself
(exec): a thread of each rank looks for the word of the one that ran out. The mathematics and the global batch stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from bootstrap.trainer.config import TrainerConfig
from bootstrap.training.environment import positive_number
from bootstrap.training.errors import TrainingError

logger = logging.getLogger(__name__)

# Largest micro-batch of a process that was started anew.
LIMIT_VARIABLE = "GPUFLEET_MICRO_BATCH_LIMIT"
_FOUND, _PORT, _READY = "gpufleet/out-of-memory", "gpufleet/port", "gpufleet/ready"
POLL_S = 0.5
# Rank 0 serves the store to the others, so it goes last.
READY_LIMIT_S = 60.0


class OutOfMemoryError(TrainingError):
    """GPU memory is too small for the smallest step that the trainer may choose."""


def micro_batch_limit() -> int | None:
    """Largest micro-batch that an earlier attempt left, or None at the first one."""
    limit = positive_number(LIMIT_VARIABLE, "samples")
    return max(1, int(limit)) if limit else None


@contextlib.contextmanager
def halving_micro_batch(config: TrainerConfig) -> Iterator[None]:
    """Start all ranks anew when one runs out of memory inside; OutOfMemoryError where that was done or cannot help."""
    watching = _Watch() if dist.is_initialized() and dist.get_world_size() > 1 else None
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:300]
        if micro_batch_limit() is not None or config.micro_batch == 1:
            raise OutOfMemoryError(_advice(config, reason)) from error
        limit = config.micro_batch // 2
        logger.warning(
            "out of GPU memory with micro-batch %d: all ranks start anew with at most %d and more accumulation; the "
            "global batch stays %d. %s", config.micro_batch, limit, config.global_batch, reason,
        )  # fmt: skip
        if watching is None:
            _start_anew({LIMIT_VARIABLE: str(limit)})
        watching.tell(limit)
    finally:
        if watching is not None:
            watching.close()


def _advice(config: TrainerConfig, reason: str) -> str:
    changes = [
        config.activation_checkpointing != "full" and "--activation-checkpointing full",
        config.sharding != "zero3" and "--sharding zero3 (on several data ranks)",
        config.micro_batch > 1 and f"--micro-batch {config.micro_batch // 2}",
        "a plan with more memory a GPU (gpufleet recommend --instance-type)",
    ]
    return (
        f"out of GPU memory with micro-batch {config.micro_batch}"
        f"{', which was halved already' if micro_batch_limit() is not None else ''}. Change one of: "
        f"{'; '.join(change for change in changes if change)}. {reason}"
    )


class _Watch:
    """Thread that waits for the word of a rank that ran out, and then replaces this process."""

    def __init__(self) -> None:
        # A connection of its own: the main thread may hold the other one's lock in a collective's set-up.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="out-of-memory watch", daemon=True)
        self._thread.start()

    def tell(self, limit: int) -> NoReturn:
        self._store.set(_FOUND, str(limit))
        while True:  # the thread replaces the process
            time.sleep(1)

    def close(self) -> None:
        """Look a last time: the error that ends this rank may come from one that ran out."""
        self._closing.set()
        # A thread that asks the store while Python shuts down would abort the process.
        self._thread.join(READY_LIMIT_S)

    def _wait(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(POLL_S)
            try:
                if not self._store.check([_FOUND]):
                    continue
                limit = self._store.get(_FOUND).decode()
                port = self._agree()
            except dist.DistError:  # the run ends, and the store with it
                return
            # A store that torchrun serves still has the old keys, so rank 0 serves a new one.
            _start_anew({LIMIT_VARIABLE: limit, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"})

    def _agree(self) -> str:
        if dist.get_rank() == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self._store.set(_PORT, str(free.getsockname()[1]))
        port: str = self._store.get(_PORT).decode()
        ready = self._store.add(_READY, 1)
        deadline = time.monotonic() + READY_LIMIT_S
        while dist.get_rank() == 0 and ready < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            ready = self._store.add(_READY, 0)
        return port


def _start_anew(variables: dict[str, str]) -> NoReturn:
    # Files that stay open across exec would keep the GPU's memory.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        if int(name) > 2:
            with contextlib.suppress(OSError):
                fcntl.fcntl(int(name), fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})  # noqa: S606
