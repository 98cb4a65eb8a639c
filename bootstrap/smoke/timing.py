"""Timing of repeated work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


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


def slowest_rank(times_by_rank: list[list[float]]) -> list[float]:
    """Slowest rank's time of each iteration: a collective ends with its last rank."""
    return [max(times) for times in zip(*times_by_rank, strict=True)]
