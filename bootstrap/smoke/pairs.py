"""Pairwise probe: hosts exchange bytes two by two, and the slow host or link shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import CheckResult, progress

# Bytes that each rank sends and receives at once, MiB.
SIZE_MIB = {"cuda": 64, "cpu": 1}
ITERATIONS = 3
# Rounds of one host: with 16 hosts each meets all others, with more each still meets 15.
MAX_ROUNDS = 15
# Shares of the usual pair's bandwidth below which a pair warns and fails: one of a node's four EFA cards lost, or two.
# Pairs of like hosts in one placement group have the same path.
WARN, FAIL = 0.75, 0.5

UNIT = "of the usual pair"
Pair = tuple[int, int]


def rounds(hosts: int) -> list[list[Pair]]:
    """Rounds of a round-robin tournament (circle method): each host once a round, each pair once."""
    places: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    played = []
    for _ in range(min(len(places) - 1, MAX_ROUNDS)):
        half = len(places) // 2
        meeting = zip(places[:half], reversed(places[half:]), strict=True)
        played.append([(min(a, b), max(a, b)) for a, b in meeting if a is not None and b is not None])
        places.insert(1, places.pop())
    return played


def usual(gb_per_s: Mapping[Pair, float]) -> float:
    """Median over the hosts of a host's best pair: a slow host spoils one host's, not each pair's, share of it."""
    return statistics.median(max(rate for pair, rate in gb_per_s.items() if host in pair) for host in _hosts(gb_per_s))


def find_slow(gb_per_s: Mapping[Pair, float], share: float) -> tuple[list[int], list[Pair]]:
    """Find hosts that are below ``share`` of the usual pair in all their pairs, and other pairs below it.

    Two hosts alone have no usual pair.
    """
    hosts = _hosts(gb_per_s)
    if len(hosts) < 3:
        return [], []
    limit = share * usual(gb_per_s)
    slow = sorted(pair for pair, rate in gb_per_s.items() if rate < limit)
    slow_hosts = [host for host in hosts if all(pair in slow for pair in gb_per_s if host in pair)]
    return slow_hosts, [pair for pair in slow if not set(pair) & set(slow_hosts)]


def _hosts(gb_per_s: Mapping[Pair, float]) -> list[int]:
    return sorted({host for pair in gb_per_s for host in pair})


def check(ranks: Ranks, names: Sequence[str], *, budget_s: float) -> list[CheckResult]:
    """Time every pair of hosts (rank by rank); of a slow pair alone, its second host is to go."""
    if len(names) < 2:
        return [CheckResult(name="slowest_pair", value=None, unit=UNIT, note="one host has nobody to exchange with")]
    size_bytes = SIZE_MIB[ranks.device.type] * 2**20
    seconds: dict[Pair, float] = {}
    for answer in ranks.gather("pairs", _measure(ranks, len(names), size_bytes, budget_s)):
        for a, b, pair_s in answer:
            # The node's ranks share its network, and the last one ends the pair's exchange.
            seconds[a, b] = max(seconds.get((a, b), 0.0), pair_s)
    node_bytes = size_bytes * ranks.local_world_size
    gb_per_s = {pair: node_bytes / pair_s / 1e9 for pair, pair_s in sorted(seconds.items())}
    if ranks.rank == 0:
        for (a, b), rate in gb_per_s.items():
            progress(f"{names[a]} with {names[b]}: {rate:.3g} GB/s each way")
    failed, warned = find_slow(gb_per_s, FAIL), find_slow(gb_per_s, WARN)
    hosts, pairs = failed if any(failed) else warned
    notes = [f"{names[host]} is slow with every host" for host in hosts]
    notes += [f"{names[a]} with {names[b]} alone is slow" for a, b in pairs]
    can_compare = len(names) > 2
    return [
        CheckResult(
            name="slowest_pair",
            value=min(gb_per_s.values()) / usual(gb_per_s),
            unit=UNIT,
            limit=FAIL if can_compare else None,
            warn=WARN if can_compare else None,
            note="; ".join(notes) or ("" if can_compare else "two hosts have no other pair to compare with"),
            # Blame the second host of a slow pair: replacing it ends the bad link; the first may be the rendezvous.
            hosts=tuple(names[host] for host in sorted({*hosts, *(b for _, b in pairs)})),
        )
    ]


def _measure(ranks: Ranks, hosts: int, size_bytes: int, budget_s: float) -> list[tuple[int, int, float]]:
    """Seconds of this rank's exchanges, (host, host, s); all rounds start, and end early, on all ranks together."""
    own = ranks.rank // ranks.local_world_size
    sent = torch.zeros(size_bytes, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    measured = []
    began = time.monotonic()
    for number, meeting in enumerate(rounds(hosts)):
        # A slow link costs its rounds only as long as the budget lasts.
        if max(ranks.gather("round", time.monotonic() - began)) > budget_s and number:
            break
        for a, b in meeting:
            if own in (a, b):
                peer = (b if own == a else a) * ranks.local_world_size + ranks.local_rank
                # The first exchange connects, and both are there when the clock starts.
                _exchange(ranks, peer, sent[:1024], received[:1024])
                times = [_exchange(ranks, peer, sent, received) for _ in range(ITERATIONS)]
                measured.append((a, b, statistics.median(times)))
    return measured


def _exchange(ranks: Ranks, peer: int, sent: torch.Tensor, received: torch.Tensor) -> float:
    began = time.perf_counter()
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    return time.perf_counter() - began
