"""Collectives: their results, element by element, and bus bandwidth with the factors of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (read 2026-11-23).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from bootstrap.contract.node_plan import Band
from bootstrap.smoke.ranks import Ranks, seconds_each
from bootstrap.smoke.report import CheckResult, band_limits, progress

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive"]

SIZES_MIB = {"cuda": (8, 64, 256, 1024), "cpu": (1, 4)}
# Buffers per size: two buffers, indices, expected values, two temporaries, and reserve.
GPU_MEMORY_PER_SIZE = 8
ITERATIONS = 20
# Elements count up to this prime and start again: every rank and chunk has another phase, and sums stay below 2**24,
# exact in float32.
PERIOD = 8191


def check(ranks: Ranks, collective: Collective, *, budget_s: float, expected: Band | None) -> list[CheckResult]:
    """Run a collective of float32 buffers: exact results, and the largest size's bandwidth against ``expected``.

    Within ``budget_s`` there are fewer iterations, and no size that a smaller one shows to be too large: the slower the
    network, the smaller its largest size.
    """
    rows: list[dict[str, Any]] = []
    sizes_mib = SIZES_MIB[ranks.device.type]
    if ranks.device.type == "cuda":
        memory_mib = torch.cuda.get_device_properties(ranks.device).total_memory / 2**20
        sizes_mib = tuple(size for size in sizes_mib if size * GPU_MEMORY_PER_SIZE <= memory_mib)
    for size_mib in sizes_mib:
        row_s = budget_s / len(sizes_mib)
        if rows and rows[-1]["time_s"] * size_mib / rows[-1]["size_mib"] > row_s:
            break
        rows.append(_measure(ranks, collective, size_mib, row_s))
    largest = rows[-1]
    word = "sums" if "reduce" in collective else "elements"
    wrong = [row for row in rows if row["wrong_elements"]]
    note = f"at {largest['size_mib']} MiB"
    if ranks.world_size == 1:
        note = "one rank has nobody to exchange with"
    return [
        CheckResult(
            name=f"{collective}_{'sum' if collective == 'all_reduce' else 'values'}",
            value=sum(row["wrong_elements"] for row in wrong),
            unit="wrong elements",
            limit=0,
            must_be="at_most",
            note=f"rank {wrong[0]['wrong_ranks'][0]} has wrong {word} at {wrong[0]['size_mib']} MiB" if wrong else "",
        ),
        CheckResult(
            name=f"{collective}_bus_bandwidth",
            value=None if ranks.world_size == 1 else largest["bus_bandwidth_gb_per_s"],
            unit="GB/s",
            note=note + (f", the plan expects {expected.value:.4g}" if expected else ""),
            details={"sizes": rows},
            **band_limits(expected),
        ),
    ]


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if collective in ("broadcast", "send_receive"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def _measure(ranks: Ranks, collective: Collective, size_mib: int, budget_s: float) -> dict[str, Any]:
    run, wrong_elements, size_bytes = _prepare(ranks, collective, size_mib)
    wrong = wrong_elements()
    ranks.barrier(f"{collective} {size_mib} MiB")
    probe_s = seconds_each(run, device=ranks.device, warm_up=0, iterations=1)[0]
    slowest_s = max(ranks.gather(f"{collective} probe", probe_s))
    iterations = max(1, min(ITERATIONS, int(budget_s / slowest_s)))
    times = seconds_each(run, device=ranks.device, warm_up=iterations // 4, iterations=iterations)
    wrong += wrong_elements()
    answers = ranks.gather(collective, {"times": times, "wrong": wrong})
    # A collective ends with its last rank.
    seconds = map(max, zip(*(answer["times"] for answer in answers), strict=True))
    factor = bus_factor(collective, ranks.world_size)
    time_s = statistics.median(seconds)
    gb_per_s = size_bytes / time_s / 1e9 * factor
    if ranks.rank == 0:
        progress(f"{collective} {size_mib} MiB: {gb_per_s:.2f} GB/s bus bandwidth")
    return {
        "size_mib": size_mib,
        "time_s": time_s,
        "bus_bandwidth_gb_per_s": gb_per_s,
        "wrong_elements": sum(answer["wrong"] for answer in answers),
        "wrong_ranks": [rank for rank, answer in enumerate(answers) if answer["wrong"]],
    }


def _prepare(
    ranks: Ranks, collective: Collective, size_mib: int
) -> tuple[Callable[[], object], Callable[[], int], int]:
    """Return the collective to time, a run of it that counts wrong elements, and its bytes as nccl-tests counts them.

    Those are the whole buffer's: sent to an all-reduce and a reduce-scatter, received from an all-gather. In
    send_receive each rank sends to the next one.
    """
    share = size_mib * 2**18 // ranks.world_size
    length = share * ranks.world_size if collective != "all_reduce" else size_mib * 2**18
    index = torch.arange(length, dtype=torch.int32, device=ranks.device) % PERIOD
    whole = torch.empty(length, dtype=torch.float32, device=ranks.device)
    everyone, own = range(ranks.world_size), slice(ranks.rank * share, (ranks.rank + 1) * share)
    is_exchange = collective in ("all_to_all", "send_receive")
    part = torch.empty(length if is_exchange else share, dtype=torch.float32, device=ranks.device)
    before, following = (ranks.rank - 1) % ranks.world_size, (ranks.rank + 1) % ranks.world_size

    def pattern(rank: int, elements: slice = slice(None)) -> torch.Tensor:
        return (index[elements] + rank) % PERIOD

    def total(elements: slice = slice(None)) -> torch.Tensor:
        result = torch.zeros_like(whole[elements])
        for rank in everyone:
            result += pattern(rank, elements)
        return result

    def send_on() -> None:
        if ranks.world_size == 1:
            part.copy_(whole)
            return
        pair = [dist.P2POp(dist.isend, whole, following), dist.P2POp(dist.irecv, part, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    # The collective, the buffer that has its result, and the right result.
    known: dict[Collective, tuple[Callable[[], object], torch.Tensor, Callable[[], torch.Tensor]]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), whole, total),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(whole, part),
            whole,
            lambda: torch.cat([pattern(rank, slice(rank * share, (rank + 1) * share)) for rank in everyone]),
        ),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), part, lambda: total(own)),
        "broadcast": (lambda: dist.broadcast(whole, src=0), whole, lambda: pattern(0)),
        "all_to_all": (
            lambda: dist.all_to_all_single(part, whole),
            part,
            lambda: torch.cat([pattern(rank, own) for rank in everyone]),
        ),
        "send_receive": (send_on, part, lambda: pattern(before)),
    }
    run, result, expected = known[collective]

    def wrong_elements() -> int:
        whole.copy_(pattern(ranks.rank))
        if collective == "all_gather":
            part.copy_(whole[own])
        run()
        return int((result != expected()).sum().item())

    return run, wrong_elements, length * 4
