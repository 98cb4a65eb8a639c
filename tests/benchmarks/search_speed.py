"""Time the search: ``python -m tests.benchmarks.search_speed [--runs N] [--out FOLDER]``.

Times ``gpufleet recommend`` cold, as whole processes over the shipped catalog, in turn with its lower limits:
``python -c pass``, and importing numpy, pydantic, click and rich. Then the search alone in one warm process, in
configurations and plans a second. Writes the raw times with the machine and the versions.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click

from optimizer.catalog import load
from optimizer.contract.request import request_from_dict
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import recommend

RESULTS = Path(__file__).parent / "results"
PYTHON = sys.executable
RECOMMEND = (str(Path(PYTHON).with_name("gpufleet")), "recommend")  # as installed
REQUESTS: dict[str, tuple[str, ...]] = {
    "llama-3.1-8b, budget and deadline": (
        *("--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192", "--budget", "3000", "--deadline", "48h"),
    ),
    "llama-3.1-8b, data parallelism only": (
        *("--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192", "--budget", "3000", "--deadline", "48h"),
        *("--parallelism", "data"),
    ),
    "llama-3.1-70b, no limits": ("--model", "llama-3.1-70b", "--tokens", "2B", "--seq-len", "8192"),
    "gpt2-xl, no limits": ("--model", "gpt2-xl", "--tokens", "2B", "--seq-len", "1024"),
}
FLOORS = {
    "python -c pass": (PYTHON, "-c", "pass"),
    "import numpy, pydantic, click, rich.table": (PYTHON, "-c", "import numpy, pydantic, click, rich.table"),
}


# A user's Python keeps the bytecode that its first run compiled.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(command: Sequence[str]) -> tuple[float, float, str]:
    """Run one process: wall seconds, processor seconds and standard output."""
    before = os.times()
    started = time.perf_counter()
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=300)
    wall = time.perf_counter() - started
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, cpu, done.stdout


def searched(flags: Sequence[str]) -> tuple[int, int]:
    """Count plans and configurations of one request."""
    answer = json.loads(run((*RECOMMEND, *flags, "--format", "json"))[2])
    return answer["searched_plans"], answer["searched"]["configurations"]


def warm_s(runs: int) -> list[float]:
    """Time ``recommend`` alone, catalog and calibration loaded, for the first of REQUESTS."""
    request = request_from_dict(
        {
            "model": "llama-3.1-8b",
            "workload": {"tokens": "2B", "seq_len": 8192},
            "constraints": {"budget_usd": 3000, "deadline_hours": 48},
        }
    )
    catalog, calibration = load(), load_calibration()
    return [recommend(request, catalog, calibration).elapsed_s for _ in range(runs)]


@click.command()
@click.option("--runs", default=11, show_default=True, help="Processes of each command.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=True)
def main(runs: int, out: Path) -> None:
    """Time the search and write results/search_speed_<yyyymm>.md."""
    commands = {**FLOORS, **{name: (*RECOMMEND, *flags) for name, flags in REQUESTS.items()}}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    load_before = os.getloadavg()[0]
    for command in commands.values():
        run(command)
    for _ in range(runs):  # in turn, so that a slower machine slows all of them
        for name, command in commands.items():
            times[name].append(run(command)[:2])
    warm = warm_s(runs)
    lines = [
        "# Speed of the search",
        "",
        f"`python -m tests.benchmarks.search_speed --runs {runs}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; "
        f"{os.cpu_count()} cores of {platform.machine()}, load average {load_before:.1f} before; "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("numpy", "pydantic", "gpufleet"))
        + ".",
        "",
        "Whole processes, cold, one after the other in turn, after one of each that leaves its bytecode; seconds, "
        "median (least to most).",
        "",
        "| process | wall | processor |",
        "|---|---|---|",
    ]
    for name, seconds in times.items():
        wall, cpu = zip(*seconds, strict=True)
        lines.append(f"| {name} | {spread(wall)} | {spread(cpu)} |")
    lines += [
        "",
        "What was searched, and the processes' speed. A plan is a configuration with a way to pay.",
        "",
        "| request | plans | configurations | configurations a second | plans a second |",
        "|---|---|---|---|---|",
    ]
    for name, flags in REQUESTS.items():
        plans, configurations = searched(flags)
        median = statistics.median(wall for wall, _ in times[name])
        lines.append(
            f"| {name} | {plans:,} | {configurations:,} | {configurations / median:,.0f} | {plans / median:,.0f} |"
        )
    lines += [
        "",
        f"The first request's search alone, in a warm process: {spread(warm)} s.",
        "",
        "## Raw wall seconds",
        "",
        *(f"- {name}: {' '.join(f'{wall:.3f}' for wall, _ in seconds)}" for name, seconds in times.items()),
        f"- search alone, warm: {' '.join(f'{seconds:.3f}' for seconds in warm)}",
        "",
    ]
    path = out / f"search_speed_{datetime.now(UTC):%Y%m}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    click.echo("\n".join(lines))


def spread(seconds: Sequence[float]) -> str:
    """Format median, least and most."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    main()
