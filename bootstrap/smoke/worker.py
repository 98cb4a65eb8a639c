"""Worker: one rank joins, measures, judges, reports, and always exits in time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from bootstrap.contract.node_plan import Expected, read_node_plan
from bootstrap.smoke import bandwidth, gradients, ranks, report

# Set by the supervisor, which then writes the report: only it knows how a killed rank ended.
SUPERVISED = "GPUFLEET_SMOKE_SUPERVISED"
REPORT_KEY = "gpufleet_smoke_report"
ERROR_KEY = "gpufleet_smoke_error"
# Limit of one exchange: loading CUDA's libraries from a cold EBS volume takes up to a minute.
COLLECTIVE_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class SmokeOptions:
    """Options of the test; ``sizes_mib`` ascend, None is no limit, ``out`` None is stdout."""

    device: Literal["cpu", "cuda"]
    sizes_mib: tuple[int, ...]
    min_bus_bandwidth_gb_per_s: float | None
    timeout_s: float
    out: Path | None

    def as_dict(self) -> dict[str, Any]:
        """The report's ``arguments``."""
        return {k: list(v) if k == "sizes_mib" else v for k, v in asdict(self).items() if k != "out"}

    def as_arguments(self) -> list[str]:
        """Command line that gives a rank these options (without ``out``: the supervisor writes)."""
        values = self.as_dict() | {"sizes_mib": ",".join(map(str, self.sizes_mib))}
        flags = {f"--{name.replace('_', '-')}": str(value) for name, value in values.items() if value is not None}
        return [text for pair in flags.items() for text in pair]


class _Reporter:
    """Growing report, marked as unfinished until the last measurement."""

    def __init__(self, options: SmokeOptions, rank: int) -> None:
        self.options, self.rank = options, rank
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.began = time.monotonic()
        self.facts: dict[str, Any] = {}
        self.results: list[report.CheckResult] = []
        self.store: Any = None

    def add(self, results: list[report.CheckResult]) -> None:
        self.results += results
        if self.rank == 0:
            for result in results:
                report.progress(result.line())
        self.publish("the run ended before its last test", final=False)

    def publish(self, error: str | None, *, final: bool) -> bool:
        """Hand the report over on rank 0; returns the verdict, the same on all ranks."""
        text = report.build(
            started_at=self.started_at,
            duration_s=time.monotonic() - self.began,
            arguments=self.options.as_dict(),
            facts=self.facts,
            results=self.results,
            error=error,
        )
        if self.rank == 0:
            if SUPERVISED in os.environ:
                if self.store is not None:
                    self.store.set(REPORT_KEY, report.to_json(text))
            elif final or self.options.out is not None:
                report.write(text, self.options.out)
        return bool(text["passed"])


def run(options: SmokeOptions) -> int:
    """Run the rank of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; returns the exit code, 0 or 1."""
    rank = int(os.environ["RANK"])
    reporter = _Reporter(options, rank)
    late = f"rank {rank} is not done after --timeout-s {options.timeout_s:g}"
    watchdog = threading.Timer(options.timeout_s, _fail, [reporter, late])
    watchdog.daemon = True
    watchdog.start()
    try:
        place = ranks.join(options.device, timeout_s=min(COLLECTIVE_TIMEOUT_S, options.timeout_s / 2))
        reporter.store = place.store
        reporter.facts = ranks.facts(place, socket.gethostname())
        for measure in measurements(place, options):
            began = time.monotonic()
            results = measure()
            duration_s = time.monotonic() - began
            reporter.add([replace(result, duration_s=duration_s) for result in results])
        passed = reporter.publish(None, final=True)
        place.leave()
    except Exception as error:  # noqa: BLE001 - the report holds every error, and the exit code is 1
        _fail(reporter, f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])
    finally:
        watchdog.cancel()
    return 0 if passed else 1


def measurements(place: ranks.Ranks, options: SmokeOptions) -> list[Callable[[], list[report.CheckResult]]]:
    """Measurements in order: correctness before speed."""
    plan = read_node_plan(os.environ)
    expected = (plan and plan.expected) or Expected()
    one_node = place.local_world_size == place.world_size
    return [
        lambda: gradients.check(place, torch.float64),
        lambda: gradients.check(place, torch.float32),
        lambda: bandwidth.check(
            place,
            options.sizes_mib,
            min_bus_bandwidth_gb_per_s=options.min_bus_bandwidth_gb_per_s,
            expected=expected.link_gb_per_s if one_node else expected.network_gb_per_s,
        ),
    ]


def _fail(reporter: _Reporter, message: str) -> NoReturn:
    report.progress(message)
    try:
        if SUPERVISED in os.environ and reporter.store is not None:
            reporter.store.set(f"{ERROR_KEY}/{reporter.rank}", message)
        reporter.publish(message, final=True)
    finally:
        # Not sys.exit: destructors of a broken NCCL communicator can hang.
        os._exit(1)
