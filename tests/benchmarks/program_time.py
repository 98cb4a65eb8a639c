"""Time the Pulumi program: ``python -m tests.benchmarks.program_time [--runs N] [--out FOLDER]``.

Runs ``infra.__main__`` for the largest plan, 64 nodes with 32 EFA cards each, in Pulumi's mock engine: as whole cold
processes, in turn with the processes it cannot be faster than (an interpreter, and the Pulumi SDK's modules that it
uses), and again in one warm process. The program's own time is the difference, and must be at most ``GOAL_S``.
Writes the raw times with the machine and the versions.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import click

from optimizer.contract.plan import FleetPlan
from tests.benchmarks.search_speed import RESULTS, run, spread
from tests.plans import SPOT_P4D, sample_plan

GOAL_S = 2.0
CONFIG = {
    "gpufleet:alarmEmail": "ops@example.com",
    "gpufleet:nat": "true",
    "gpufleet:trainCommand": "train.py",
    "gpufleet:ceilingUsd": "100000",
    "gpufleet:tags": json.dumps({f"tag-{number}": "value" for number in range(6)}),
}
"""All that adds resources or arguments."""


def largest_plan() -> FleetPlan:
    """Make a plan of 64 p5.48xlarge nodes, on demand: 512 GPUs, 32 EFA cards a node."""
    nodes = 64
    return sample_plan(
        instance_type="p5.48xlarge",
        node_count=nodes,
        node={
            "gpu": "H100",
            "gpu_memory_gib": 80,
            "vcpus": 192,
            "memory_gib": 2048,
            "nvme_gb": 30720,
            "network_gbit_per_s": 3200,
            "network_cards": 32,
            "efa_cards": 32,
        },
        purchase={"option": "on-demand", "on_demand_base": 0},
        job={"global_batch": 2048, "steps": 125},
        parallelism={"data": 8 * nodes, "micro_batch": 4, "grad_accum": 1},
        prices=[{**SPOT_P4D["prices"][0], "item": "on-demand p5.48xlarge us-east-1", "usd": 55.04}],
    )


def program() -> Counter[str]:
    """Run the program once in the mock engine; count its resources by type."""
    from infra.offline.preview import resources

    return Counter(resource.type for resource in resources(largest_plan(), stack="largest", config=CONFIG))


def sdk_modules() -> list[str]:
    """List the Pulumi SDK's modules that this process has loaded, in order."""
    program()
    return [name for name in sys.modules if name.split(".")[0] in ("pulumi", "pulumi_aws", "grpc", "google")]


HERE = "from tests.benchmarks import program_time; "


@click.command()
@click.option("--runs", default=9, show_default=True, help="Processes of each kind.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=True)
def main(runs: int, out: Path) -> None:
    """Time the program and write results/program_time_<yyyymm>.md; exit 1 where it takes longer than the goal."""
    listing = run(("-c", HERE + "print(chr(10).join(program_time.sdk_modules()))"))[2].split()
    # The same test modules are loaded too, so that the difference is the program's alone.
    imports = f"import importlib; import tests.benchmarks.program_time; [importlib.import_module(n) for n in {listing}]"
    commands = {
        "interpreter": ("-c", "pass"),
        "interpreter and SDK": ("-c", imports),
        "interpreter, SDK and program": ("-c", HERE + "program_time.program()"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    load_before = os.getloadavg()[0]
    for _ in range(runs):  # in turn, so that a slower machine slows all of them
        for name, arguments in commands.items():
            times[name].append(run(arguments)[0])
    own = [
        whole - floor
        for whole, floor in zip(times["interpreter, SDK and program"], times["interpreter and SDK"], strict=True)
    ]
    types = program()
    warm = []
    for _ in range(runs):
        started = time.perf_counter()
        program()
        warm.append(time.perf_counter() - started)
    median = statistics.median(own)
    plan = largest_plan()
    lines = [
        "# Time of the Pulumi program",
        "",
        f"`python -m tests.benchmarks.program_time --runs {runs}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; "
        f"{os.cpu_count()} cores of {platform.machine()}, load average {load_before:.1f} before; "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("pulumi", "pulumi-aws", "pydantic", "gpufleet"))
        + ".",
        "",
        f"The program for {plan.node_count} x {plan.instance_type}, {plan.node.efa_cards} EFA cards each, in the mock "
        f"engine: {types.total()} resources of {len(types)} types. Seconds of wall time, median (least to most).",
        "",
        "| process, cold | s |",
        "|---|---|",
        *(f"| {name} | {spread(seconds)} |" for name, seconds in times.items()),
        f"| **the program alone** (the last less the one before, pair by pair) | **{spread(own)}** |",
        "",
        f"The goal is at most {GOAL_S:g} s beyond interpreter and SDK: {'met' if median <= GOAL_S else 'missed'}. "
        f"Again in a warm process: {spread(warm)} s.",
        "",
        "## Raw wall seconds",
        "",
        *(f"- {name}: {_raw(seconds)}" for name, seconds in times.items()),
        f"- the program alone: {_raw(own)}",
        f"- warm: {_raw(warm)}",
        "",
    ]
    path = out / f"program_time_{datetime.now(UTC):%Y%m}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    click.echo("\n".join(lines))
    if median > GOAL_S:
        raise click.ClickException(f"the program takes {median:.2f} s, the goal is {GOAL_S:g} s")


def _raw(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in seconds)


if __name__ == "__main__":
    main()
