"""Command line: runs one of torchrun's ranks."""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap.contract.codec import FormatError
from bootstrap.contract.node_plan import Expected, read_node_plan

NODE_LIMIT_S, GANG_LIMIT_S = 600.0, 90.0
# A rank that hangs before it watches the time, as in a broken GPU's driver, is killed so long after the limit.
HANGS_S = 150
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the smoke test; 0 pass or warn, 1 a test or a rank failed, 2 wrong usage."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    is_gang = asked.scope == "gang"
    if asked.time_limit_s is not None and not 0 < asked.time_limit_s < math.inf:
        parser.error(f"--time-limit-s is {asked.time_limit_s}, not a finite number above 0")
    if lacking := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        parser.error(f"{', '.join(lacking)} unset: start it with torchrun on every node, or set them for each rank")
    for name in NUMBERS:
        if not os.environ.get(name, "0").isdecimal():
            parser.error(f"{name} is {os.environ[name]!r}, no whole number: start it with torchrun, which sets it")
    if int(rank := os.environ["RANK"]) >= int(world_size := os.environ["WORLD_SIZE"]):
        parser.error(f"RANK is {rank} of WORLD_SIZE {world_size}: ranks count from 0")
    try:
        plan = read_node_plan(os.environ)
    except FormatError as error:
        parser.error(str(error))
    limit_s = asked.time_limit_s or (GANG_LIMIT_S if is_gang else NODE_LIMIT_S)
    signal.alarm(math.ceil(limit_s) + HANGS_S)  # no handler: the kernel ends the process
    # Imported late: torch takes seconds, and --help does not wait.
    import torch

    from bootstrap.smoke import gang

    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    on_gpu = asked.device == "cuda" or (asked.device == "auto" and gpus > 0)
    if on_gpu and ranks > gpus:
        sys.stderr.write(f"smoke: {ranks} ranks need as many GPUs, and torch sees {gpus}; next: nvidia-smi\n")
        return 1
    # NCCL_DEBUG writes to stdout, where the report goes.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return gang.run(
        gang.SmokeOptions(
            device="cuda" if on_gpu else "cpu",
            name=asked.name,
            expected=(plan and plan.expected) or Expected(),
            time_limit_s=limit_s,
            out=asked.out,
            is_gang=is_gang,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.smoke",
        description="Smoke test of this node: DDP's gradients and all-reduce bandwidth, one rank a GPU. "
        "gang: of all nodes of a run together, also every collective, every pair of hosts and every rank's speed. "
        "Started by torchrun --standalone --nproc-per-node gpu -m bootstrap.smoke, or any launcher that sets RANK, "
        "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each node writes the JSON report to "
        "--out; a gang's bad_hosts are to be replaced. Rank 0 prints the results to stderr.",
        epilog="Exit code: 0 pass or warn, 1 a test failed or a rank was lost, 2 wrong usage.",
    )
    parser.add_argument("scope", nargs="?", choices=["gang"], help="test all nodes of a run together")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--name", default=socket.gethostname(), help="this host in the report (default: its host name)")
    parser.add_argument(
        "--time-limit-s",
        type=float,
        metavar="SECONDS",
        help=f"end and fail after this long (default: {NODE_LIMIT_S:g}; gang: {GANG_LIMIT_S:g})",
    )
    parser.add_argument("--out", type=_writable, metavar="FILE", help="report file (default: stdout of rank 0)")
    return parser


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder is missing, or it is one")
    return path


if __name__ == "__main__":
    sys.exit(main())
