"""Host memory that a rank's part of a checkpoint is copied to: allocated once, page-locked beside a GPU.

torchrun keeps it: the process in the place of a killed one finds the last copied state there, and need not read it from
the store. Only what has the manifest's checksums counts (loading.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from bootstrap.training.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Page-locks are set in time proportional to the pages; touching huge pages first, in parallel, makes it fast.
TOUCH_BYTES = 256 * 2**20
TOUCH_THREADS = 8
# Left to the operating system and the training's own growth; at most as much as the checkpoints need.
RESERVE_BYTES = 2 * 2**30
CGROUP = Path("/sys/fs/cgroup")
CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
# Kept memory that a run of this process has: a second run gets memory of its own.
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def make_kept(local_rank: str) -> int:
    """Make memory that this process keeps for its child ``local_rank``, empty at first; -1 where there is none."""
    # Pythons of conda and uv have no os.memfd_create: https://github.com/astral-sh/uv/issues/15081
    return int(ctypes.CDLL(None).memfd_create(f"gpufleet-rank-{local_rank}".encode(), CLOSE_ON_EXEC))


def open_kept() -> int:
    """Open the memory that the parent keeps for this rank; -1 where it keeps none, or another run has it."""
    name = f"/memfd:gpufleet-rank-{os.environ.get('LOCAL_RANK')} (deleted)"
    for link in () if _maps else Path(f"/proc/{os.getppid()}/fd").glob("*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) == name:
                kept = os.open(link, os.O_RDWR)
                try:
                    os.lockf(kept, os.F_TLOCK, 0)  # as long as it is mapped; what this process forks has no part in it
                except OSError:
                    os.close(kept)
                else:
                    return kept
    return -1


def allocate(size: int, kept: int, *, pinned: bool) -> torch.Tensor:
    """Bytes of the memory ``kept``, or of the process's own; ``pinned``: copies of a GPU run beside the CPU."""
    started = time.monotonic()
    buffer = _touched(max(size, 1), kept)
    if not pinned:
        return buffer
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1))
    if error:
        logger.warning("cudaHostRegister of %d bytes failed with error %d: torch allocates the buffer", size, error)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr()).atexit = False
    logger.info("page-locked %.1f GiB in %.2f s", size / 2**30, time.monotonic() - started)
    return buffer


def _touched(size: int, kept: int) -> torch.Tensor:
    """Memory that forked children share, every page present; in huge pages where gpufleet-train.service allows them."""
    if kept != -1:
        os.ftruncate(kept, max(size, os.stat(kept).st_size))
    memory = mmap.mmap(kept, size)
    if kept != -1:
        _maps.add(memory)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(TOUCH_THREADS) as threads:
        for piece in torch.split(buffer, TOUCH_BYTES):
            threads.submit(piece[:: mmap.PAGESIZE].add_, 0)  # leaves what is there
    return buffer


def refuse_too_large(size: int, *, local_ranks: int, other_bytes: int, held: int = 0) -> None:
    """Refuse buffers that this node's memory cannot hold: ``size`` and ``other_bytes`` a rank, less ``held`` in all."""
    needed = (size + other_bytes) * local_ranks
    available, where = available_bytes()
    available += held
    reserve = min(needed, RESERVE_BYTES)
    if needed + reserve > available:
        raise ConfigurationError(
            f"checkpoints need {needed / 2**30:.1f} GiB of host memory on this node ({local_ranks} ranks × "
            f"{size / 2**30:.1f} GiB of state and {other_bytes / 2**30:.1f} GiB for the transfer), and "
            f"{available / 2**30:.1f} GiB are free ({where}): take a machine with more memory, or more ranks"
        )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(cast(Any, tensor.numpy()))


def available_bytes() -> tuple[int, str]:
    """Free host memory, and the file that says so: the machine's or the control group's, whichever is less."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    limits = [(kib * 1024, str(meminfo))]
    # https://docs.kernel.org/admin-guide/cgroup-v2.html: memory.current counts the page cache, which can be dropped.
    limit, current, stat = (CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        used = int(current.read_text(encoding="ascii")) - _file_cache_bytes(stat)
        limits.append((int(text) - max(0, used), str(limit)))
    return min(limits)


def _file_cache_bytes(stat: Path) -> int:
    rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return sum(int(value) for name, value in rows if name in ("inactive_file", "active_file"))
