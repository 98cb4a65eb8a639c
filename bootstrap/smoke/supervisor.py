"""Supervisor of one node's smoke test: starts a process a rank, tells the others when one dies, ends all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

# torch re-exports the stores only where it is built with distributed, which mypy does not follow.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from bootstrap.smoke import report
from bootstrap.smoke.ranks import STORE_PREFIX
from bootstrap.smoke.watch import LINGER_S, ROLL_CALL_S, tell_fault

# After a rank's end its peers get this long to ask who still answers, to report and to leave.
GRACE_S = ROLL_CALL_S + 2 * LINGER_S + 4
POLL_S = 0.1
RANK_PROGRAM = ("-m", "bootstrap.smoke")


def run(arguments: Sequence[str], nproc: int, *, time_limit_s: float, out: Path | None) -> int:
    """Run ``nproc`` ranks with the command's ``arguments``; returns the exit code, 0 or 1.

    This process holds the rendezvous store.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    final: dict[str, Any] = report.build(started_at=started_at, arguments={}, error="no rank reported")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        processes: list[subprocess.Popen[bytes]] = []
        try:
            # Inside the try, so that a signal during the start leaves no rank behind.
            for rank in range(nproc):
                processes.append(_start(rank, nproc, store.port, [*arguments, "--out", str(file)]))
            report.progress(f"{nproc} ranks, pids {' '.join(str(process.pid) for process in processes)}")
            # The ranks report and exit at the time limit; the grace is for that.
            ends = _watch(processes, PrefixStore(STORE_PREFIX, store), deadline=began + time_limit_s + GRACE_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if file.exists():
            final = json.loads(file.read_text(encoding="utf-8"))
    if ends:
        final |= {"passed": False, "verdict": "fail", "error": "; ".join(filter(None, [*ends, final["error"]]))}
    final["duration_s"] = round(time.monotonic() - began, 3)
    report.write(final, out)
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
    }
    # NCCL_DEBUG writes to stdout, where the report goes.
    return subprocess.Popen([sys.executable, *RANK_PROGRAM, *arguments], env=environment, stdout=sys.stderr.fileno())


def _watch(processes: Sequence[subprocess.Popen[bytes]], store: Store, *, deadline: float) -> list[str]:
    """Wait until all ranks have ended; returns how those ended that could not report."""
    ended: dict[int, str] = {}
    while (running := [rank for rank, process in enumerate(processes) if process.poll() is None]) and (
        time.monotonic() < deadline
    ):
        for rank, process in enumerate(processes):
            if process.poll() and rank not in ended:
                deadline = min(deadline, time.monotonic() + GRACE_S)
                # Code 1 is a rank's verdict, in the report.
                ended[rank] = "" if process.returncode == 1 else _ending(process.returncode)
                if ended[rank]:
                    tell_fault(store, rank, ended[rank])
        time.sleep(POLL_S)
    ends = [f"rank {rank} {end}" for rank, end in sorted(ended.items()) if end]
    return ends + [f"rank {rank} still ran at the end and was killed" for rank in running]


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
