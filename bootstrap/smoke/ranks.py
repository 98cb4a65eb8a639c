"""This process among its ranks: device, process group, exchanges without GPU and NCCL, and times of work."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch re-exports the stores only where it is built with distributed, which mypy does not follow.
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

# Rank 0 names the silent rank before the others stop waiting for it.
COLLECTING = timedelta(seconds=5)


@dataclass(kw_only=True)
class Ranks:
    """This rank and its peers; exchanges use the rendezvous store, as NCCL would spin a kernel while waiting."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    store: Store
    timeout: timedelta
    _calls: Counter[str] = field(default_factory=Counter)

    def gather(self, label: str, value: Any) -> list[Any]:
        """Every rank's JSON ``value``, by rank; all call with the same ``label``. TimeoutError names a silent rank.

        Rank 0 collects for all: with each asking each, a thousand ranks would send the store a million requests.
        """
        self._calls[label] += 1
        prefix = f"{label}/{self._calls[label]}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(value))
        if self.rank:
            answer = self._read(f"{prefix}/all", 0, label, self.timeout + COLLECTING)
            if isinstance(answer, str):
                raise TimeoutError(answer)
            return list(answer)
        try:
            values = [self._read(f"{prefix}/{peer}", peer, label, self.timeout) for peer in range(self.world_size)]
        except TimeoutError as error:
            self.store.set(f"{prefix}/all", json.dumps(str(error)))
            raise
        self.store.set(f"{prefix}/all", json.dumps(values))
        return values

    def _read(self, key: str, peer: int, label: str, timeout: timedelta) -> Any:
        try:
            self.store.wait([key], timeout)
        except RuntimeError as error:  # torch raises DistStoreError, a RuntimeError
            seconds = self.timeout.total_seconds()
            raise TimeoutError(
                f"rank {peer} did not answer within {seconds:.0f} s at {label!r}: it hangs or died"
            ) from error
        return json.loads(self.store.get(key))

    def barrier(self, label: str) -> None:
        """Wait for every rank, with this rank's GPU idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.gather(f"barrier {label}", None)

    def leave(self) -> None:
        """End the process group; the rank that may host the store leaves last."""
        # Together: tearing down a NCCL communicator may wait for its peers.
        dist.destroy_process_group()
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self.store.wait([f"left/{peer}" for peer in range(self.world_size)], self.timeout)


def meet(device_type: str, *, timeout_s: float) -> Ranks:
    """Meet the ranks of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT at their store, without a process group yet."""
    timeout = timedelta(seconds=timeout_s)
    root, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=device,
        store=PrefixStore("gpufleet_smoke", root),
        timeout=timeout,
    )


def connect(ranks: Ranks, *, timeout: timedelta) -> None:
    """Form the process group, "cpu" with gloo, "cuda" with NCCL; a collective may take ``timeout``."""
    on_gpu = ranks.device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        store=PrefixStore("process_group", ranks.store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        # With its device named, NCCL connects now and a bad link fails here, not in the first collective.
        device_id=ranks.device if on_gpu else None,
    )


def facts(ranks: Ranks, hostname: str) -> dict[str, Any]:
    """Hosts, devices and software for the report; every rank calls it."""
    on_gpu = ranks.device.type == "cuda"
    name = torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None  # type: ignore[no-untyped-call]
    return {
        "world_size": ranks.world_size,
        "ranks": ranks.gather("facts", {"hostname": hostname, "name": name}),
        "software": {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl},
    }


def seconds_each(work: Callable[[], object], *, device: torch.device, warm_up: int, iterations: int) -> list[float]:
    """Seconds of each of ``iterations`` runs after ``warm_up`` untimed; on a GPU the host waits only at the end."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(iterations):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return times
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [events[i].elapsed_time(events[i + 1]) / 1000 for i in range(iterations)]
