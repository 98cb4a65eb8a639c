"""The smoke test on the ranks of one node, or of all nodes of a run together (gang); a gang's bad hosts are named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist

from bootstrap.contract.node_plan import Expected
from bootstrap.smoke import bandwidth, gradients, pairs, products, ranks, report, watch

# Shares of the time limit; what is left is for joining and gradients.
COLLECTIVES, PAIRS, PRODUCTS = 0.3, 0.15, 0.03
# For all ranks to start and to connect: NCCL takes longer the more there are.
JOIN_S = 45.0
# The same on a node whose first program of CUDA's this is: its libraries take up to a minute from a cold EBS volume.
COLD_JOIN_S = 120.0
# Steps that load libraries too.
FIRST_STEPS = ("connect", "gradients")
# Seconds that measurements may take in all, however late the test is ended.
MEASURING_S = 90.0
Measurement = tuple[str, Callable[[], list[report.CheckResult]]]


@dataclass(frozen=True, kw_only=True)
class SmokeOptions:
    """Options of the test; ``name`` is this host's, ``out`` None prints the report of rank 0 only.

    ``is_gang``: test all nodes of a run together, with pairs of hosts, every collective and products.
    """

    device: Literal["cpu", "cuda"]
    name: str
    expected: Expected
    time_limit_s: float
    out: Path | None
    is_gang: bool = True


class _Gang:
    """State of one run on this rank: the results so far, and the report of this host."""

    def __init__(self, options: SmokeOptions, place: ranks.Ranks) -> None:
        self.options, self.place, self.began = options, place, time.monotonic()
        self.results: list[report.CheckResult] = []
        self.facts: dict[str, Any] = {}
        self.hosts: list[str] = []  # of each rank
        self.names: list[str] = []  # of each node

    def meet(self) -> None:
        """Learn every rank's host; equal names get the node's number."""
        self.facts = ranks.facts(self.place, self.options.name)
        given = [rank["hostname"] for rank in self.facts["ranks"]][:: self.place.local_world_size]
        self.names = [name if given.count(name) == 1 else f"{name}-{node}" for node, name in enumerate(given)]
        self.hosts = [self.names[rank // self.place.local_world_size] for rank in range(self.place.world_size)]

    def host(self, rank: int) -> str:
        """Name of a rank's host, where it has told."""
        return self.hosts[rank] if self.hosts else f"the host of rank {rank}"

    def finish(self, error: str | None, lost: Sequence[str] = (), hung: str = "") -> bool:
        """Report the verdict; True where the gang may train. ``hung``: the step that hangs though all ranks live."""
        verdicts = [result.verdict for result in self.results]
        passed = error is None and bool(verdicts) and "fail" not in verdicts
        bad = bad_hosts(lost, self.results, self.names)
        text = {
            "schema_version": report.SCHEMA_VERSION,
            "passed": passed,
            "verdict": max(verdicts, key=report.VERDICTS.index) if passed else "fail",
            "error": error,
            "duration_s": round(time.monotonic() - self.began, 3),
            **self.facts,
            "tests": [asdict(result) | {"verdict": result.verdict} for result in self.results],
            "host": self.host(self.place.rank),
            "bad_hosts": bad,
            "hung": hung,
        }
        if self.place.rank == 0:
            for result in self.results:
                value = "" if result.value is None else f"{result.value:.4g} {result.unit}"
                report.progress(f"{result.verdict} {result.name} {value} {', '.join(result.hosts) or result.note}")
            report.progress(f"{text['verdict']}; bad hosts: {', '.join(bad) or 'none'}; {error or 'no error'}")
        if self.place.local_rank == 0 and (self.options.out or self.place.rank == 0):
            report.write(text, self.options.out)
        return passed

    def lose(self, reason: str, loss: watch.Loss) -> None:
        """Report a test that could not end."""
        told = [f"{self.host(rank)}, rank {rank}: {fault}" for rank, fault in loss.faults.items()]
        told += dict.fromkeys(f"{self.host(rank)} does not answer" for rank in loss.silent)
        hung = loss.hung if not told else ""
        if hung:
            reason = f"{hung} hangs, though every rank answers"
        self.finish("; ".join([*told, reason]), [self.host(rank) for rank in (*loss.faults, *loss.silent)], hung)


def run(options: SmokeOptions) -> int:
    """Run the rank of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; 0 where the gang may train, else 1."""
    join_s = JOIN_S if options.is_gang else COLD_JOIN_S
    try:
        place = ranks.meet(options.device, timeout_s=join_s)
    except RuntimeError as error:  # torch raises DistNetworkError, a RuntimeError, with its C++ frames
        report.progress(f"rank 0 at MASTER_ADDR and MASTER_PORT does not answer: {str(error).splitlines()[0]}")
        return 1
    gang = _Gang(options, place)
    guard = watch.Watch(place, limit_s=options.time_limit_s, report=gang.lose)
    try:
        guard.step("meet", join_s)
        gang.meet()
        place.timeout = timedelta(seconds=watch.STEP_S)
        for name, measure in measurements(gang):
            guard.step(name, join_s if name in FIRST_STEPS else None)
            gang.results += measure()
        passed = gang.finish(None)
        guard.step("leave")
        place.leave()
        guard.stop()
    except Exception as error:  # noqa: BLE001 - the report holds every error, and the exit code is 1
        # Gloo's errors name the path of its source.
        of_network = isinstance(error, dist.DistError | TimeoutError) or "gloo" in str(error)
        guard.fail(f"{type(error).__name__}: {error}".splitlines()[0], own=not of_network)
    return 0 if passed else 1


def measurements(gang: _Gang) -> list[Measurement]:
    """Measurements in order."""
    place, options, expected = gang.place, gang.options, gang.options.expected
    budget_s = min(options.time_limit_s, MEASURING_S)
    band = expected.network_gb_per_s if len(gang.names) > 1 else expected.link_gb_per_s

    def connect() -> list[report.CheckResult]:
        # NCCL's own watchdog would end the process without a report; the step's limit is shorter.
        on_gpu = place.device.type == "cuda"
        ranks.connect(place, timeout=timedelta(seconds=10 * options.time_limit_s if on_gpu else watch.STEP_S))
        return []

    def collective(name: bandwidth.Collective) -> Measurement:
        # The plan states the rate of rings that use all of a node's cards.
        rate = band if name in ("all_reduce", "all_gather", "reduce_scatter") else None
        share_s = COLLECTIVES / len(names) * budget_s
        return name, lambda: bandwidth.check(place, name, expected=rate, budget_s=share_s)

    # A plugin may pass some collectives and hang in another (bootstrap/known-bad.csv).
    names: tuple[bandwidth.Collective, ...] = get_args(bandwidth.Collective) if options.is_gang else ("all_reduce",)
    products_s, rate = PRODUCTS * budget_s, expected.matmul_tflop_per_s
    first: list[Measurement] = [("connect", connect), ("gradients", lambda: gradients.check(place, gang.hosts))]
    if options.is_gang:
        first.append(("pairs", lambda: pairs.check(place, gang.names, budget_s=PAIRS * budget_s)))
        first.append(("products", lambda: products.check(place, gang.hosts, rate, budget_s=products_s)))
    return [*first, *map(collective, names)]


def bad_hosts(lost: Sequence[str], results: Sequence[report.CheckResult], names: Sequence[str]) -> list[str]:
    """Lost hosts, else those that failed tests blame, else warnings; more than half of all hosts are never blamed."""
    failed = [result for result in results if result.verdict == "fail"]
    warned = [result for result in results if result.verdict == "warn" and failed]
    blamed = [{name for result in missed for name in result.hosts} for missed in (failed, warned)]
    # The fault of most hosts is not theirs. Where rank 0's host loses the others, a failed test may have named it.
    few = (bad for bad in (set(lost), blamed[0] or blamed[1]) if 2 * len(bad) <= len(names) or not names)
    return sorted(next(filter(None, few), ()))
