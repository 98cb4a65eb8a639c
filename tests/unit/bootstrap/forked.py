"""Ranks forked from one start of torch, which is most of a short run: ``python -m …forked MODULE RANKS PATH``.

Each rank calls the module's ``main(PATH)`` with the variables that torchrun would set. The first that fails ends all.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, ranks: int, path: Path) -> str:
    """Run the ranks in a process of their own; return what they wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, str(ranks), str(path)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("GPUFLEET_")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stderr


def _run_rank(module: str, rank: int, ranks: int, port: int, path: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    # torch's name for "the store is there already; connect to it".
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in names.items()}
    sys.modules[module].main(path)


def main(module: str, ranks: int, path: Path) -> int:
    """Fork the ranks and wait for them."""
    importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # DDP and FSDP import it at their first use
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [ForkProcess(target=_run_rank, args=(module, rank, ranks, store.port, path)) for rank in range(ranks)]
    for process in processes:
        process.start()
    while (running := [one for one in processes if one.exitcode is None]) and not any(
        one.exitcode for one in processes
    ):
        wait([process.sentinel for process in running])
    for process in running:
        process.kill()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
