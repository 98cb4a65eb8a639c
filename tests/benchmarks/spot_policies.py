"""Spot policies on published traces: cost by deadline, cross-validated; deadlines under slow restarts and lost work.

    python -m tests.benchmarks.spot_policies TRACES_FOLDER

writes ``results/spot_policies_202611.md`` and ``.csv`` (a row a trace, policy and deadline). The hazard curve of
``adaptive`` is judged twice: as it ships, and fitted anew for each family of traces on the other families alone.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from bootstrap.contract import adaptive
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.replay import NAMES, Result, replay
from optimizer.economics.simulation.traces import Trace, read_trace

RESULTS = Path(__file__).parent / "results"
NAME = "spot_policies_202611"
WORK_HOURS, RESTART_HOURS, PRICE_RATIO = 48.0, 0.2, 3.3
DEADLINES = (1.08, 1.2, 1.5, 2.0)
STARTS = 300
COMPARED = ("greedy", "uniform_progress", "adaptive")
# Families by the beginning of a file's name.
FAMILIES = {
    "aws-2022": "AWS 2022, 1 node of V100 or K80",
    "preemption_1-node": "AWS 2023, preemptions of 1 node",
    "preemption_4-node": "AWS 2023, preemptions of 4 nodes, any 1",
    "availability_16-node": "AWS 2023, 16 nodes, any 1",
    "gcp-2025": "another cloud 2025, 16 × H100, any 1",
}
_OFFSETS_HOURS = np.linspace(0.05, 2, 40)


def main(folder: Path) -> None:
    """Run all and write the page and its rows."""
    families = {family: [read_trace(path) for path in sorted(folder.glob(f"{family}*.json"))] for family in FAMILIES}
    traces = [trace for group in families.values() for trace in group]
    processes = len(os.sched_getaffinity(0))
    began = time.perf_counter()
    shipped = {
        factor: replay(traces, _job(factor), NAMES, starts=STARTS, seed=0, processes=processes) for factor in DEADLINES
    }
    elapsed_s = (time.perf_counter() - began) / len(DEADLINES)
    curves = {family: fit([t for other in families if other != family for t in families[other]]) for family in families}
    crossed = {factor: _cross_validated(families, curves, factor, processes) for factor in DEADLINES}
    with (RESULTS / f"{NAME}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["deadline_factor", "curve", *asdict(shipped[1.2][0])], lineterminator="\n")
        writer.writeheader()
        for curve, by_factor in (("shipped", shipped), ("other families", crossed)):
            for factor, results in by_factor.items():
                rows = ({"deadline_factor": factor, "curve": curve, **asdict(result)} for result in results)
                writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    uncertain = replay(
        traces,
        _job(1.2, restart_p95_hours=0.4, checkpoint_hours=0.5),
        (*COMPARED, "omniscient"),
        starts=330,
        seed=7,
        processes=processes,
    )
    lines = _page(families, shipped, crossed, uncertain, curves, elapsed_s)
    (RESULTS / f"{NAME}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def fit(traces: Sequence[Trace]) -> tuple[float, float]:
    """Curve c / (age + b) of the largest likelihood over all stretches, with capacity and without."""
    ages: list[float] = []
    ended: list[bool] = []
    for trace in traces:
        bounds = np.flatnonzero(np.diff(trace.nodes > 0, prepend=trace.nodes[0] <= 0, append=trace.nodes[-1] <= 0))
        hours = np.diff(bounds) * trace.gap_s / 3600
        ages += hours.tolist()
        ended += [True] * (len(hours) - 1) + [False]  # the trace ends before the last stretch does
    age, end = np.array(ages), np.array(ended)
    best = (-np.inf, 0.0, 0.0)
    for offset in _OFFSETS_HOURS:
        exposure = np.log((age + offset) / offset).sum()
        scale = end.sum() / exposure
        likelihood = (end * np.log(scale / (age + offset))).sum() - scale * exposure
        best = max(best, (float(likelihood), float(scale), float(offset)))
    return best[1], best[2]


def _job(factor: float, **changes: float) -> Job:
    return Job(
        work_hours=WORK_HOURS,
        deadline_hours=factor * WORK_HOURS,
        price_ratio=PRICE_RATIO,
        restart_hours=RESTART_HOURS,
        **changes,
    )


def _cross_validated(
    families: dict[str, list[Trace]], curves: dict[str, tuple[float, float]], factor: float, processes: int
) -> list[Result]:
    results = []
    shipped = adaptive.HAZARD
    try:
        for family, group in families.items():
            adaptive.HAZARD = curves[family]
            adaptive.table.cache_clear()
            results += replay(group, _job(factor), ["adaptive"], starts=STARTS, seed=0, processes=processes)
    finally:
        adaptive.HAZARD = shipped
        adaptive.table.cache_clear()
    return results


def _mean(results: Sequence[Result], policy: str, traces: Sequence[Trace]) -> float:
    """Mean cost over traces, as a share of 48 h of on-demand without a restart, as published figures are."""
    names = {trace.name for trace in traces}
    costs = [row.mean_normalised_cost for row in results if row.policy == policy and row.trace in names]
    return float(np.mean(costs)) * (WORK_HOURS + RESTART_HOURS) / WORK_HOURS


def _page(
    families: dict[str, list[Trace]],
    shipped: dict[float, list[Result]],
    crossed: dict[float, list[Result]],
    uncertain: list[Result],
    curves: dict[str, tuple[float, float]],
    elapsed_s: float,
) -> list[str]:
    everything = [trace for group in families.values() for trace in group]
    aws = [trace for trace in everything if not trace.name.startswith("gcp")]
    lines = [
        "# Spot policies on published traces",
        "",
        f"`python -m tests.benchmarks.spot_policies TRACES`: {len(everything)} traces, {STARTS} random starts each, "
        f"{WORK_HOURS:g} h of work on one node, restart {RESTART_HOURS:g} h, on-demand {PRICE_RATIO} × spot. Cost as a "
        "share of 48 h of on-demand; × is the ratio to the omniscient bound. Others' curve: "
        f"fitted on the other families alone. All policies over all traces: "
        f"{elapsed_s:.1f} s a deadline. Rows: "
        f"[{NAME}.csv]({NAME}.csv).",
        "",
        "| traces | deadline | greedy | Uniform Progress | adaptive | adaptive, others' curve | omniscient |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, group in [
        ("**all AWS**", aws),
        *((FAMILIES[family], families[family]) for family in families),
    ]:
        for factor in DEADLINES:
            bound = _mean(shipped[factor], "omniscient", group)
            costs = [_mean(shipped[factor], policy, group) for policy in COMPARED]
            costs.append(_mean(crossed[factor], "adaptive", group))
            cells = " | ".join(f"{cost:.3f} (×{cost / bound:.3f})" for cost in costs)
            lines.append(f"| {title} ({len(group)}) | {factor}× | {cells} | {bound:.3f} |")
    starts = sum(row.starts for row in uncertain if row.policy == "adaptive")
    lines += [
        "",
        "Curves fitted on the other families (hazard c / (age + b), 1/h; shipped: "
        f"c {adaptive.HAZARD[0]:g}, b {adaptive.HAZARD[1]:g} h):",
        "",
        "| judged on | c | b, h |",
        "|---|---|---|",
        *(f"| {FAMILIES[family]} | {scale:.2f} | {offset:.2f} |" for family, (scale, offset) in curves.items()),
        "",
        "## Deadlines with slow restarts and lost work",
        "",
        "Deadline 1.2×, restart lognormal with mean 0.2 h and 95th percentile 0.4 h, an interruption loses a uniform "
        f"part of a checkpoint interval of 0.5 h; {starts} starts:",
        "",
        "| policy | deadlines missed | cost |",
        "|---|---|---|",
    ]
    for policy in COMPARED:
        rows = [row for row in uncertain if row.policy == policy]
        missed = round(sum(row.missed_fraction * row.starts for row in rows))
        lines.append(f"| {policy} | {missed} | {_mean(uncertain, policy, everything):.3f} |")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]))
