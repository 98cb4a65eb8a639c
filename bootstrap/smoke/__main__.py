"""Command line: runs one of torchrun's ranks, or the supervisor of this node's ranks."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bootstrap.contract.codec import FormatError
from bootstrap.contract.node_plan import VARIABLE, Expected, read_node_plan

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_CPU_PROCESSES = 2
DEFAULT_GANG_LIMIT_S = 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the smoke test; 0 all passed, 1 a test or a rank failed, 2 wrong usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["gang"]:
        return _run_gang(arguments[1:])
    parser = _parser()
    asked = parser.parse_args(arguments)
    device = _device(asked.device)
    if device is None:
        return 1
    # Imported here: torch takes seconds, and --help does not wait.
    import torch

    from bootstrap.smoke import bandwidth, supervisor, worker

    gpus = torch.cuda.device_count()
    options = worker.SmokeOptions(
        device=device,
        sizes_mib=tuple(sorted(asked.sizes_mib or bandwidth.default_sizes_mib(device))),
        min_bus_bandwidth_gb_per_s=asked.min_bus_bandwidth_gb_per_s,
        timeout_s=asked.timeout_s,
        out=asked.out,
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if asked.nproc is not None:
            parser.error("--nproc starts ranks, and torchrun has started this one already: leave --nproc out")
        return worker.run(options)
    nproc = asked.nproc or (gpus if device == "cuda" else DEFAULT_CPU_PROCESSES)
    if device == "cuda" and nproc > gpus:
        sys.stderr.write(f"smoke: --nproc {nproc} needs as many GPUs, and torch sees {gpus}; next: nvidia-smi\n")
        return 1
    return supervisor.run(options, nproc)


def _run_gang(arguments: Sequence[str]) -> int:
    parser = _gang_parser()
    asked = parser.parse_args(arguments)
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacking:
        parser.error(f"{', '.join(lacking)} unset: start it with torchrun on every node, or set them for each rank")
    try:
        plan = read_node_plan({VARIABLE: asked.plan})
    except FormatError as error:
        parser.error(str(error))
    device = _device(asked.device)
    if device is None:
        return 1
    from bootstrap.smoke import gang

    return gang.run(
        gang.GangOptions(
            device=device,
            name=asked.name,
            expected=(plan and plan.expected) or Expected(),
            time_limit_s=asked.time_limit_s,
            out=asked.out,
        )
    )


def _device(asked: str) -> Literal["cpu", "cuda"] | None:
    """Choose the device; None, with the reason on stderr, where torch or the GPU is not there."""
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("smoke: torch is not installed for this python; next: pip install 'gpufleet[torch]'\n")
        return None
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        sys.stderr.write("smoke: --device cuda, and torch sees no GPU; next: nvidia-smi\n")
        return None
    return "cuda" if asked == "cuda" or (asked == "auto" and gpus) else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.smoke",
        description="DDP smoke test: gradients and all-reduce bandwidth. "
        "Starts one rank a GPU (or --nproc on CPU) of this node; under torchrun it is one of torchrun's ranks. "
        "The JSON report goes to stdout or --out, progress to stderr.",
        epilog="Exit code: 0 all passed, 1 a test or a rank failed, 2 wrong usage.",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--nproc", type=_count, help="ranks to start (default: every GPU; 2 on CPU)")
    parser.add_argument(
        "--sizes-mib",
        type=_sizes,
        metavar="N[,N...]",
        help="all-reduce buffer sizes, MiB (default: 1,8,64,256,1024 on GPU; 1,4,16 on CPU)",
    )
    parser.add_argument(
        "--min-bus-bandwidth-gb-per-s",
        type=_positive,
        metavar="GB_PER_S",
        help="fail below this all-reduce bus bandwidth at the largest size, GB/s (10^9 bytes)",
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="end and fail after this long (default: %(default)g)",
    )
    parser.add_argument("--out", type=_writable, metavar="FILE", help="report file (default: stdout)")
    return parser


def _gang_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.smoke gang",
        description="Gang test: gradients, collectives, every pair of hosts and every rank's products, on all nodes "
        "of a run together. One of torchrun's ranks, or of any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each node writes the JSON report to --out; its bad_hosts are "
        "to be replaced. Rank 0 prints a table to stderr.",
        epilog="Exit code: 0 pass or warn, the gang may train; 1 a test failed or a host was lost; 2 wrong usage.",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--name", default=socket.gethostname(), help="this host in the report (default: its host name)")
    parser.add_argument(
        "--plan",
        default=os.environ.get(VARIABLE, ""),
        metavar="JSON",
        help=f"plan whose expected rates are the limits (default: {VARIABLE} of the environment)",
    )
    parser.add_argument(
        "--time-limit-s",
        type=_positive,
        default=DEFAULT_GANG_LIMIT_S,
        metavar="SECONDS",
        help="end and fail after this long; sizes and iterations follow it (default: %(default)g)",
    )
    parser.add_argument("--out", type=_writable, metavar="FILE", help="report file (default: stdout of rank 0)")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _sizes(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder is missing, or it is one")
    return path


if __name__ == "__main__":
    sys.exit(main())
