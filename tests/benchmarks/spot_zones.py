"""Spot in several pools: the hazard's curve, and the policies against the bound; spot_gangs.py has the gangs.

``python -m tests.benchmarks.spot_zones FOLDER`` reads the traces of FOLDER (availability and preemption traces of
github.com/skypilot-org/spot-traces, and the 13 H100 zones of 2025) and writes ``results/spot_zones_<yyyymm>.csv`` and
``.md``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import gammaln

from bootstrap.contract.pools import YOUNG_S
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.together import TogetherResult, replay_together
from optimizer.economics.simulation.traces import Trace, read_trace
from optimizer.economics.simulation.zones import Launching

RESULTS = Path(__file__).parent / "results"
# With 60 starts chance moves a row by up to 0.02.
STARTS = 240
WORK_HOURS = 48.0
PRICE_RATIO = 3.3
# A stay counts up to this length in pools.py.
HORIZON_HOURS = 8.0
POLICIES = ("fallback", "greedy", "uniform_progress", "adaptive", "adaptive_one_group", "omniscient")

# (name, traces, gang) of the families that the curve was fitted to, and of those that it was not.
FITTED = (
    ("AWS 2022, V100 and K80", "aws-2022*", 1),
    ("AWS 2023, 16 V100 nodes", "availability*", 1),
    ("AWS 2023, 16 V100 nodes", "availability*", 16),
    ("AWS 2023, preemptions of a V100 node", "preemption_1*", 1),
    ("AWS 2023, preemptions of 4 V100 nodes", "preemption_4*", 1),
    ("AWS 2023, preemptions of 4 V100 nodes", "preemption_4*", 4),
)
JUDGED = (("H100 2025", "gcp*", 1), ("H100 2025", "gcp*", 8), ("H100 2025", "gcp*", 16))


def stays(traces: Iterable[Trace], gang: int, *, up: bool) -> tuple[list[float], list[float], list[bool]]:
    """Shortest and longest lengths, h, of the stretches with the gang (or without), and whether their end was seen."""
    shortest, longest, ended = [], [], []
    for trace in traces:
        has = trace.nodes >= gang
        edges = [0, *(np.flatnonzero(np.diff(has)) + 1), len(has)]
        for begin, end in pairwise(edges[1:]):
            if has[begin] == up:
                hours = (end - begin) * trace.gap_s / 3600
                shortest.append(hours - trace.gap_s / 3600)
                longest.append(hours)
                ended.append(bool(end < len(has)))
    return shortest, longest, ended


def fit(shortest: Sequence[float], longest: Sequence[float], ended: Sequence[bool]) -> tuple[float, float]:
    """Shape and youngest age, h, of the Lomax distribution of most likelihood: rate shape / (age + youngest)."""
    low, high, seen = np.array(shortest), np.array(longest), np.array(ended)

    def loss(logs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        shape, young = np.exp(logs)
        survive_low, survive_high = (1 + low / young) ** -shape, (1 + high / young) ** -shape
        return -float(np.log(np.maximum(np.where(seen, survive_low - survive_high, survive_high), 1e-12)).sum())

    shape, young = np.exp(minimize(loss, [0.0, 0.0], method="Nelder-Mead").x)
    return float(shape), float(young)


def stay_when_met(trace: Trace, gang: int) -> float:
    """Mean stay of capacity that is met at a random moment, in the next HORIZON_HOURS; no capacity: not a number."""
    has, gap_hours = trace.nodes >= gang, trace.gap_s / 3600
    ticks = np.arange(len(has) - round(HORIZON_HOURS / gap_hours))
    changes = np.append(np.flatnonzero(np.diff(has)) + 1, len(has))
    lasts = np.minimum((changes[np.searchsorted(changes, ticks, side="right")] - ticks) * gap_hours, HORIZON_HOURS)
    met = lasts[has[ticks]]
    return float(met.mean()) if len(met) else float("nan")


def spread(traces: Iterable[tuple[Trace, int]], *, up: bool) -> float:
    """Shape of the gamma distribution, of mean 1, of the traces' factors on the shipped rate: its weight in events."""
    measured = [stays([trace], gang, up=up) for trace, gang in traces]
    events = np.array([sum(ended) for _, _, ended in measured])
    expected = np.array([np.log1p(np.array(longest) * 3600 / YOUNG_S).sum() for _, longest, _ in measured])

    def loss(log: float) -> float:
        shape = np.exp(log)
        odds = events * np.log(np.maximum(expected, 1e-9) / (shape + expected)) + shape * np.log(
            shape / (shape + expected)
        )
        return -float((gammaln(shape + events) - gammaln(shape) + odds).sum())

    return float(np.exp(minimize_scalar(loss, bounds=(-3, 6), method="bounded").x))


def scenarios(read: dict[str, list[Trace]]) -> Iterable[tuple[str, list[Trace], int, float, dict[str, float]]]:
    """Name, traces, gang, deadline over work, and extras of each case."""
    h100 = read["gcp*"]
    without = [trace for trace in h100 if "asia-south2" not in trace.name]
    america = [trace for trace in h100 if "-us-" in trace.name]
    for name, traces in (("13 H100 zones", h100), ("12: without asia-south2-b", without), ("8 of the US", america)):
        for gang in (1, 8, 16):
            yield name, traces, gang, 1.5, {"restart_hours": 1 / 6}
    for gang in (1, 16):
        yield (
            "13 H100 zones, lost work, slow moves",
            h100,
            gang,
            1.5,
            {
                "restart_hours": 1 / 6,
                "restart_p95_hours": 0.4,
                "checkpoint_hours": 0.5,
                "move_hours": 0.25,
            },
        )
        yield "8 of the US, prices 0.15 to 0.7 of on-demand", america, gang, 1.5, {"restart_hours": 1 / 6, "spread": 1}
        yield "8 of the US", america, gang, 1.2, {"restart_hours": 0.2}
        yield "3 AWS zones, V100 2023", read["availability*"], gang, 1.5, {"restart_hours": 0.2}
        yield "3 AWS zones, V100 2023", read["availability*"], gang, 1.2, {"restart_hours": 0.2}


def play(traces: list[Trace], gang: int, slack: float, extras: dict[str, float]) -> list[TogetherResult]:
    """All policies in one case."""
    terms = {name: value for name, value in extras.items() if name not in ("move_hours", "spread")}
    ratios = np.full(len(traces), PRICE_RATIO)
    if extras.get("spread"):
        ratios = 1 / np.random.default_rng(0).permutation(np.linspace(0.15, 0.7, len(traces)))
    return replay_together(
        traces,
        Job(work_hours=WORK_HOURS, deadline_hours=WORK_HOURS * slack, price_ratio=PRICE_RATIO, **terms),
        POLICIES,
        launching=Launching(try_hours=2 / 60, move_hours=extras.get("move_hours", 0.0)),
        price_ratios=ratios.tolist(),
        starts=STARTS,
        seed=0,
        nodes=gang,
    )


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


def main(folder: str) -> None:
    """Write the results."""
    patterns = dict.fromkeys([pattern for _, pattern, _ in (*FITTED, *JUDGED)])
    read = {pattern: [read_trace(path) for path in sorted(Path(folder).glob(pattern))] for pattern in patterns}
    lines = [f"# Spot in several pools, {datetime.now(UTC):%Y-%m-%d}", "", f"{STARTS} starts a case."]
    columns: tuple[str, ...] = (
        "traces",
        "gang",
        "stays: shape",
        "youngest, h",
        "droughts: shape",
        "youngest, h",
        "stretches",
    )
    lines += heading("Rate of ends at an age: shape / (age + youngest)", columns)
    together: dict[bool, tuple[list[Any], ...]] = {True: ([], [], []), False: ([], [], [])}
    for name, pattern, gang in (*FITTED, ("all of AWS", "", 0), *JUDGED):
        cells, count = [], 0
        for up in (True, False):
            measured: tuple[list[Any], ...] = stays(read[pattern], gang, up=up) if pattern else together[up]
            if (name, pattern, gang) in FITTED:
                for column, values in zip(together[up], measured, strict=True):
                    column.extend(values)
            shape, young = fit(*measured)
            cells += [f"{shape:.2f}", f"{young:.2f}"]
            count += len(measured[0])
        lines.append(f"| {name} | {gang or ''} | {' | '.join(cells)} | {count} |")
    columns = ("traces", "series", "stay when met, h of 8", "factor of stays: shape", "of droughts")
    lines += heading("What a run meets: mean stay from a random moment on, and how the series' factors vary", columns)
    for name, cases in (("all of AWS", FITTED), ("H100 2025", JUDGED)):
        series = [(trace, gang) for _, pattern, gang in cases for trace in read[pattern]]
        met = float(np.nanmean([stay_when_met(trace, gang) for trace, gang in series]))
        shapes = " | ".join(f"{spread(series, up=up):.0f}" for up in (True, False))
        lines.append(f"| {name} | {len(series)} | {met:.2f} | {shapes} |")
    columns = ("pools", "gang", "deadline", "bound", *POLICIES[:-1], "adaptive: refusals, moves", "missed")
    lines += heading("Policies, mean cost over the lower bound's", columns)
    rows = []
    for name, traces, gang, slack, extras in scenarios(read):
        results = play(traces, gang, slack, extras)
        bound = results[-1].mean_normalised_cost
        adaptive = results[POLICIES.index("adaptive")]
        ratios = " | ".join(f"{result.mean_normalised_cost / bound:.3f}" for result in results[:-1])
        missed = max(result.missed_fraction for result in results)
        tries = f"{adaptive.refusals:.0f}, {adaptive.moves:.0f}"
        lines.append(f"| {name} | {gang} | {slack:g} | {bound:.4f} | {ratios} | {tries} | {missed:g} |")
        print(lines[-1], flush=True)
        for result in results:
            rows.append({"pools": name, "gang": gang, "deadline_over_work": slack, **asdict(result)})
    write_results("spot_zones", lines, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
