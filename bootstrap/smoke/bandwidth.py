"""All-reduce test: the sum, element by element, and algorithm and bus bandwidth (bytes / time, times 2(n-1)/n) of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (read 2026-11-21).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import Result, progress
from bootstrap.smoke.timing import seconds_each, slowest_rank

SIZES_MIB = {"cuda": (1, 8, 64, 256, 1024), "cpu": (1, 4, 16)}
# Buffers per size: buffer, indices, expected sums, two temporaries, and reserve.
GPU_MEMORY_PER_SIZE = 8
WARM_UP = 5
ITERATIONS = 20
# Elements count up to this prime and start again: every rank and chunk has another phase, and sums stay below 2**24,
# exact in float32.
PERIOD = 8191


def default_sizes_mib(device_type: str) -> tuple[int, ...]:
    """Buffer sizes of this kind of device that its memory allows, MiB."""
    if device_type != "cuda":
        return SIZES_MIB[device_type]
    memory_mib = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) / 2**20
    return tuple(size for size in SIZES_MIB[device_type] if size * GPU_MEMORY_PER_SIZE <= memory_mib)


def check(ranks: Ranks, sizes_mib: Sequence[int], *, min_bus_bandwidth_gb_per_s: float | None) -> list[Result]:
    """All-reduce float32 buffers: exact sums, and the largest size's bandwidth against the limit."""
    rows = [_measure(ranks, size_mib) for size_mib in sizes_mib]
    largest = rows[-1]
    alone = ranks.world_size == 1
    wrong_notes = [
        f"rank {row['wrong_ranks'][0]} has {row['wrong_elements']} wrong sums at {row['size_mib']} MiB"
        for row in rows
        if row["wrong_elements"]
    ]
    return [
        Result(
            name="all_reduce_sum",
            value=sum(row["wrong_elements"] for row in rows),
            unit="wrong elements",
            limit=0,
            must_be="at_most",
            note=wrong_notes[0] if wrong_notes else "",
        ),
        Result(
            name="all_reduce_bus_bandwidth",
            value=None if alone else largest["bus_bandwidth_gb_per_s"]["median"],
            unit="GB/s",
            limit=min_bus_bandwidth_gb_per_s,
            must_be="at_least",
            note="one rank has nobody to exchange with" if alone else f"at {largest['size_mib']} MiB",
            details={"warm_up": WARM_UP, "iterations": ITERATIONS, "sizes": rows},
        ),
    ]


def _measure(ranks: Ranks, size_mib: int) -> dict[str, Any]:
    size_bytes = size_mib * 2**20
    index = torch.arange(size_bytes // 4, dtype=torch.int32, device=ranks.device) % PERIOD
    buffer = torch.empty(size_bytes // 4, dtype=torch.float32, device=ranks.device)

    def wrong_elements() -> int:
        buffer.copy_((index + ranks.rank) % PERIOD)
        dist.all_reduce(buffer)
        expected = torch.zeros_like(buffer)
        for rank in range(ranks.world_size):
            expected += (index + rank) % PERIOD
        return int((buffer != expected).sum().item())

    wrong_before = wrong_elements()
    ranks.barrier(f"all-reduce {size_mib} MiB")
    times = seconds_each(lambda: dist.all_reduce(buffer), device=ranks.device, warm_up=WARM_UP, iterations=ITERATIONS)
    wrong = wrong_before + wrong_elements()
    answers = ranks.gather("all-reduce", {"times": times, "wrong": wrong})
    seconds = slowest_rank([answer["times"] for answer in answers])
    bus_factor = 2 * (ranks.world_size - 1) / ranks.world_size
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    # The longest time is the lowest bandwidth.
    gb_per_s = {"median": size_bytes / median / 1e9, "min": size_bytes / high / 1e9, "max": size_bytes / low / 1e9}
    if ranks.rank == 0:
        progress(f"all-reduce {size_mib} MiB: {gb_per_s['median'] * bus_factor:.2f} GB/s bus bandwidth")
    return {
        "size_mib": size_mib,
        "time_ms": {"median": median * 1e3, "min": low * 1e3, "max": high * 1e3},
        "algorithm_bandwidth_gb_per_s": gb_per_s,
        "bus_bandwidth_gb_per_s": {name: value * bus_factor for name, value in gb_per_s.items()},
        "wrong_elements": sum(answer["wrong"] for answer in answers),
        "wrong_ranks": [rank for rank, answer in enumerate(answers) if answer["wrong"]],
    }
