"""Supervisor: starts one process a rank on this node, ends all when one fails, and reports which rank died."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

# torch re-exports the stores only where it is built with distributed, which mypy does not follow.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from bootstrap.smoke import report, worker

# A failed rank's peers get this long to report before they are killed.
GRACE_S = 5.0
POLL_S = 0.1
RANK_PROGRAM = ("-m", "bootstrap.smoke")


def run(options: worker.SmokeOptions, nproc: int) -> int:
    """Run ``nproc`` ranks and return the exit code, 0 or 1; this process holds the rendezvous store."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        # Inside the try, so that a signal during the start leaves no rank behind.
        for rank in range(nproc):
            processes.append(_start(rank, nproc, store.port, options.as_arguments()))
        report.progress(f"{nproc} ranks on {options.device}, pids {' '.join(str(p.pid) for p in processes)}")
        # The workers report and exit at timeout_s; the grace is for that.
        error = _watch(processes, deadline=began + options.timeout_s + GRACE_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    errors = "; ".join(filter(None, [error, *(_read(store, f"{worker.ERROR_KEY}/{i}") for i in range(nproc))]))
    final: dict[str, Any] = report.build(started_at=started_at, arguments=options.as_dict(), error="no rank reported")
    if text := _read(store, worker.REPORT_KEY):
        final = json.loads(text)
    if errors:
        final |= {"passed": False, "verdict": "fail", "error": errors}
    final["duration_s"] = round(time.monotonic() - began, 3)
    report.write(final, options.out)
    if final["error"]:
        report.progress(f"FAIL {final['error']}")
    return 0 if final["passed"] else 1


def _start(rank: int, nproc: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch's name for "the store is there already; connect to it".
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        worker.SUPERVISED: "1",
    }
    # NCCL_DEBUG writes to stdout, where the report goes.
    return subprocess.Popen([sys.executable, *RANK_PROGRAM, *arguments], env=environment, stdout=sys.stderr.fileno())


def _watch(processes: Sequence[subprocess.Popen[bytes]], *, deadline: float) -> str | None:
    """Wait until all ranks are done, or one failed and its peers had their grace; return the failures, or None."""
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > deadline:
            return "; ".join(f"rank {i} still ran after the time limit and was killed" for i in _running(processes))
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_S:
            break
        time.sleep(POLL_S)
    hanging = [f"rank {rank} still ran after the first failure and was killed" for rank in _running(processes)]
    # Code 1 is a rank's verdict, in the report; a rank with another code could not report.
    odd = [_ending(rank, p.returncode) for rank, p in enumerate(processes) if p.returncode not in (None, 0, 1)]
    return "; ".join([*odd, *hanging]) or None


def _running(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if process.poll() is None]


def _ending(rank: int, code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} exited with code {code}"


def _read(store: Store, key: str) -> str:
    key = f"gpufleet_smoke/{key}"
    return str(store.get(key), "utf-8") if store.check([key]) else ""
