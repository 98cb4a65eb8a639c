"""Spot policies on published traces, in one pool and in several: cost over the lower bound, missed deadlines.

    python -m tests.benchmarks.spot_policies TRACES_FOLDER

writes ``results/spot_policies_<yyyymm>.md`` and ``.csv`` (a row a case and policy). The traces are those of
github.com/skypilot-org/spot-traces and 13 H100 zones of another cloud of 2025.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.economics.simulation.replay import NAMES, OMNISCIENT, PolicyFigures, replay
from optimizer.economics.simulation.simulator import SimulatedJob
from optimizer.economics.simulation.traces import CapacityTrace, read_trace

RESULTS = Path(__file__).parent / "results"
WORK_HOURS, RESTART_HOURS, PRICE_RATIO = 48.0, 0.2, 3.3
DEADLINES = (1.08, 1.2, 1.5, 2.0)
# In several pools, chance moves a row by up to 0.02 with 60 starts.
STARTS, STARTS_TOGETHER = 30, 240
COMPARED = tuple(name for name in NAMES if name not in ("on_demand", "spot_only", OMNISCIENT))
# Families by the beginning of a file's name.
FAMILIES = {
    "aws-2022": "AWS 2022, 1 node of V100 or K80",
    "preemption_1-node": "AWS 2023, preemptions of 1 node",
    "preemption_4-node": "AWS 2023, preemptions of 4 nodes, any 1",
    "availability_16-node": "AWS 2023, 16 nodes, any 1",
    "gcp-2025": "another cloud 2025, 16 × H100, any 1",
}
UNCERTAIN = {"checkpoint_hours": 0.5}


def heading(title: str, columns: Sequence[str]) -> list[str]:
    """Lines of a heading and of a table's head."""
    return ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def write_results(name: str, lines: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write the page and the raw rows, with this month in their names."""
    stem = RESULTS / f"{name}_{datetime.now(UTC):%Y%m}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with stem.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def together(
    read: Mapping[str, list[CapacityTrace]],
) -> Iterator[tuple[str, list[CapacityTrace], int, float, dict[str, float]]]:
    """Name, traces, gang, deadline over work, and extras of each case of several pools."""
    h100, aws = read["gcp-2025"], read["availability_16-node"]
    america = [trace for trace in h100 if "-us-" in trace.name]
    soon = {"restart_hours": 1 / 6}
    for gang in (1, 16):
        yield "13 H100 zones", h100, gang, 1.5, soon
        yield "8 of the US", america, gang, 1.5, soon
        yield "13 H100 zones, lost work", h100, gang, 1.5, {**soon, **UNCERTAIN}
        yield "8 of the US, prices 0.15 to 0.7 of on-demand", america, gang, 1.5, {**soon, "spread": 1}
        yield "8 of the US", america, gang, 1.2, {}
        yield "3 AWS zones, V100 2023", aws, gang, 1.5, {}
        yield "3 AWS zones, V100 2023", aws, gang, 1.2, {}


def play(
    traces: list[CapacityTrace], factor: float, extras: Mapping[str, float], **choices: Any
) -> list[PolicyFigures]:
    """All policies in one case; ``choices`` are those of ``replay``."""
    terms = {name: value for name, value in extras.items() if name != "spread"}
    ratios = np.full(len(traces), PRICE_RATIO)
    if extras.get("spread"):
        ratios = 1 / np.random.default_rng(0).permutation(np.linspace(0.15, 0.7, len(traces)))
    job = SimulatedJob(
        work_hours=WORK_HOURS,
        deadline_hours=factor * WORK_HOURS,
        price_ratio=PRICE_RATIO,
        **{"restart_hours": RESTART_HOURS, **terms},
    )
    processes = len(os.sched_getaffinity(0))
    return replay(traces, job, NAMES, price_ratios=ratios, seed=0, processes=processes, **choices)


def compare(results: Sequence[PolicyFigures]) -> str:
    """Cells of a table: the bound's mean cost, that of each policy over it, and deadlines that adaptive missed."""
    costs = {name: np.mean([row.mean_normalised_cost for row in results if row.policy == name]) for name in NAMES}
    missed = sum(round(row.missed_fraction * row.starts) for row in results if row.policy == "adaptive")
    ratios = [f"{costs[name] / costs[OMNISCIENT]:.3f}" for name in COMPARED]
    return " | ".join([f"{costs[OMNISCIENT]:.4f}", *ratios, str(missed)])


def main(folder: Path) -> None:
    """Play all cases and write the page and its rows."""
    read = {family: [read_trace(path) for path in sorted(folder.glob(f"{family}*.json"))] for family in FAMILIES}
    rows: list[dict[str, object]] = []
    lines = ["# Spot policies on published traces", "", *_ABOUT]

    def show(cells: Sequence[object], results: Sequence[PolicyFigures]) -> None:
        lines.append(f"| {' | '.join(map(str, cells))} | {compare(results)} |")
        print(lines[-1], flush=True)

    def add(pools: str, gang: int, factor: float, results: Sequence[PolicyFigures]) -> None:
        key = {"pools": pools, "gang": gang, "deadline_over_work": factor}
        rows.extend({**key, **asdict(result)} for result in results)

    ratios = ("bound", *COMPARED, "adaptive missed")
    lines += heading(f"One pool, {STARTS} starts a trace", ("traces", "deadline", *ratios))
    everything = [trace for traces in read.values() for trace in traces]
    for factor in DEADLINES:
        results = play(everything, factor, {}, starts=STARTS)
        add("one", 1, factor, results)
        families = {f"{title} ({len(read[family])})": (family,) for family, title in FAMILIES.items()}
        for title, prefixes in {"**all AWS** (18)": ("aws", "preemption", "availability"), **families}.items():
            show((title, f"{factor}×"), [row for row in results if row.trace.startswith(prefixes)])
    title = "One pool, up to half an hour of work lost"
    lines += heading(title, ("traces", "deadline", *ratios))
    uncertain = play(everything, 1.2, UNCERTAIN, starts=STARTS)
    show((f"all ({len(everything)})", "1.2×"), uncertain)
    add("one, uncertain", 1, 1.2, uncertain)
    lines += heading(f"Several pools, {STARTS_TOGETHER} starts a case", ("pools", "gang", "deadline", *ratios))
    for name, traces, gang, factor, extras in together(read):
        results = play(traces, factor, extras, starts=STARTS_TOGETHER, nodes=gang, together=True)
        show((name, gang, f"{factor:g}×"), results)
        add(name, gang, factor, results)
    write_results("spot_policies", lines, rows)


_ABOUT = [
    f"`python -m tests.benchmarks.spot_policies TRACES`: {WORK_HOURS:g} h of work, restart {RESTART_HOURS:g} h (10 "
    f"minutes in the H100 zones at 1.5×), on-demand {PRICE_RATIO} × spot, two minutes a refusal. Bound: mean cost of "
    "the omniscient lower bound, on-demand from start to end = 1. Policies: mean cost over the bound's.",
]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
