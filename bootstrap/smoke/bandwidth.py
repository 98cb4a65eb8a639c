"""Collectives: their results, element by element, and algorithm and bus bandwidth with the factors of
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (read 2026-11-23).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from bootstrap.contract.node_plan import Band
from bootstrap.smoke.ranks import Ranks, seconds_each, slowest_rank
from bootstrap.smoke.report import CheckResult, band_limits, find_low, progress

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive"]

SIZES_MIB = {"cuda": (1, 8, 64, 256, 1024), "cpu": (1, 4, 16)}
# Buffers per size: two buffers, indices, expected values, two temporaries, and reserve.
GPU_MEMORY_PER_SIZE = 8
ITERATIONS = 20
# Elements count up to this prime and start again: every rank and chunk has another phase, and sums stay below 2**24,
# exact in float32.
PERIOD = 8191
# Below, latency takes a share of the time that a rate does not show.
LARGE_MIB = 256


def default_sizes_mib(device_type: str) -> tuple[int, ...]:
    """Buffer sizes of this kind of device that its memory allows, MiB."""
    if device_type != "cuda":
        return SIZES_MIB[device_type]
    memory_mib = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) / 2**20
    return tuple(size for size in SIZES_MIB[device_type] if size * GPU_MEMORY_PER_SIZE <= memory_mib)


def check(
    ranks: Ranks,
    sizes_mib: Sequence[int],
    *,
    budget_s: float,
    min_bus_bandwidth_gb_per_s: float | None = None,
    expected: Band | None = None,
    collective: Collective = "all_reduce",
) -> list[CheckResult]:
    """Run a collective of float32 buffers: exact results, and the largest size's bandwidth against the limit.

    The limit is ``min_bus_bandwidth_gb_per_s``, else the ``expected`` band's where buffers are large enough. Within
    ``budget_s`` there are fewer iterations, and no size that a smaller one shows to be too large.
    """
    rows: list[dict[str, Any]] = []
    for size_mib in sizes_mib:
        row_s = budget_s / len(sizes_mib)
        if rows and rows[-1]["time_ms"]["median"] * size_mib / rows[-1]["size_mib"] > row_s * 1e3:
            break
        rows.append(_measure(ranks, collective, size_mib, row_s))
    largest = rows[-1]
    alone = ranks.world_size == 1
    word = "sums" if "reduce" in collective else "elements"
    wrong_notes = [
        f"rank {row['wrong_ranks'][0]} has {row['wrong_elements']} wrong {word} at {row['size_mib']} MiB"
        for row in rows
        if row["wrong_elements"]
    ]
    band = expected if expected and largest["size_mib"] >= LARGE_MIB else None
    return [
        CheckResult(
            name=f"{collective}_{'sum' if collective == 'all_reduce' else 'values'}",
            value=sum(row["wrong_elements"] for row in rows),
            unit="wrong elements",
            limit=0,
            must_be="at_most",
            note=wrong_notes[0] if wrong_notes else "",
        ),
        CheckResult(
            name=f"{collective}_bus_bandwidth",
            value=None if alone else largest["bus_bandwidth_gb_per_s"]["median"],
            unit="GB/s",
            limit=min_bus_bandwidth_gb_per_s or (band.fail_below if band else None),
            warn=band.warn_below if band else None,
            must_be="at_least",
            note="one rank has nobody to exchange with"
            if alone
            else f"at {largest['size_mib']} MiB" + (f", the plan expects {band.value:.4g}" if band else ""),
            details={"sizes": rows},
        ),
    ]


def check_inside(ranks: Ranks, names: Sequence[str], expected: Band | None) -> list[CheckResult]:
    """All-reduce inside each node, all nodes at once: the slowest node against the plan's rate."""
    per_node = ranks.local_world_size
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks.world_size, per_node)]
    # Every rank makes all groups (https://docs.pytorch.org/docs/stable/distributed.html#groups).
    own = [dist.new_group(members) for members in nodes][ranks.rank // per_node]
    size_mib = LARGE_MIB if ranks.device.type == "cuda" else SIZES_MIB["cpu"][1]
    buffer = torch.zeros(size_mib * 2**18, device=ranks.device)
    ranks.barrier("inside")
    times = seconds_each(lambda: dist.all_reduce(buffer, group=own), device=ranks.device, warm_up=2, iterations=5)
    answers = ranks.gather("inside", statistics.median(times))
    scale = size_mib * 2**20 * bus_factor("all_reduce", per_node) / 1e9
    rates = [scale / max(answers[members[0] : members[-1] + 1]) for members in nodes]
    lowest = rates.index(min(rates))
    low = find_low(rates, warn=expected.warn_below, fail=expected.fail_below or 0.0) if expected else []
    return [
        CheckResult(
            name="inside_node_bus_bandwidth",
            value=rates[lowest],
            unit="GB/s",
            must_be="at_least",
            note=f"{names[lowest]} at {size_mib} MiB"
            + (f", the plan expects {expected.value:.4g}" if expected else ""),
            hosts=tuple(names[node] for node in low),
            details={"gb_per_s": dict(zip(names, rates, strict=True))},
            **band_limits(expected),
        )
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
    warm_up = iterations // 4
    times = seconds_each(run, device=ranks.device, warm_up=warm_up, iterations=iterations)
    wrong += wrong_elements()
    answers = ranks.gather(collective, {"times": times, "wrong": wrong})
    seconds = slowest_rank([answer["times"] for answer in answers])
    factor = bus_factor(collective, ranks.world_size)
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    # The longest time is the lowest bandwidth.
    gb_per_s = {"median": size_bytes / median / 1e9, "min": size_bytes / high / 1e9, "max": size_bytes / low / 1e9}
    if ranks.rank == 0:
        progress(f"{collective} {size_mib} MiB: {gb_per_s['median'] * factor:.2f} GB/s bus bandwidth")
    return {
        "size_mib": size_mib,
        "warm_up": warm_up,
        "iterations": iterations,
        "time_ms": {"median": median * 1e3, "min": low * 1e3, "max": high * 1e3},
        "algorithm_bandwidth_gb_per_s": gb_per_s,
        "bus_bandwidth_gb_per_s": {name: value * factor for name, value in gb_per_s.items()},
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
