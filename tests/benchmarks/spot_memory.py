"""Over which lag a spot pool's past events predict its later ones.

``python -m tests.benchmarks.spot_memory FOLDER`` reads the traces of FOLDER (as ``spot_gangs``) and writes
``results/spot_memory_<yyyymm>.csv`` and ``.md``. Two days of a pool, weighed by 2^(-age / half-life) and laid over a
prior of ten events with the family's mean rate (``bootstrap.contract.adaptive.learned_factor``), predict the events of
a later day; the score is the Poisson log likelihood over that of the prior alone. HALF_LIFE_DAYS of
optimizer/economics/interruption.py is the half-life with the best score of all families.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bootstrap.contract.adaptive import learned_factor
from optimizer.economics.simulation.traces import Trace, read_trace
from optimizer.performance.types import Floats
from tests.benchmarks.spot_zones import heading, write_results

# (family, traces, nodes of the gang).
FAMILIES = (
    ("AWS 2022, V100 and K80", "aws-2022*", 1),
    ("AWS 2023, V100", "preemption_1*", 1),
    ("AWS 2023, 4 x V100", "preemption_4*", 4),
    ("AWS 2023, 16 x V100", "availability*", 16),
    ("H100 2025, 8 nodes", "gcp*", 8),
)
HALF_LIVES_DAYS = (0.5, 1, 2, 4, 6, 8, 10, 14, 20, 28, 60, 365)
PAST_DAYS = 2
# Days from the middle of the past to the middle of the later day, at lag 0.
_AGE_DAYS = (PAST_DAYS + 1) / 2
LEAST_CASES = 15


def count_days(trace: Trace, gang: int) -> dict[str, Floats]:
    """Count events and hours at risk of each whole day, shape (days, 2): losses of capacity, and its returns."""
    has, hours = trace.nodes >= gang, trace.gap_s / 3600
    ticks = round(24 / hours)
    days: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for begin in range(0, len(has) - ticks + 1, ticks):
        day = has[begin : begin + ticks + 1]
        days["losses"].append((float((day[:-1] & ~day[1:]).sum()), float(day[:ticks].sum() * hours)))
        days["returns"].append((float((~day[:-1] & day[1:]).sum()), float((~day[:ticks]).sum() * hours)))
    return {name: np.array(pairs) for name, pairs in days.items()}


def list_cases(pools: Sequence[Floats]) -> Iterator[tuple[int, float, float, float, float]]:
    """Yield lag in days, events and expected events of the past, and those of the later day."""
    rate = sum(pool[:, 0].sum() for pool in pools) / sum(pool[:, 1].sum() for pool in pools)
    for pool in pools:
        for now in range(PAST_DAYS, len(pool)):
            events, hours = pool[now - PAST_DAYS : now].sum(axis=0)
            for lag, (later, later_hours) in enumerate(pool[now:]):
                if hours and later_hours:
                    yield lag, events, rate * hours, later, rate * later_hours


def score(cases: Sequence[tuple[int, float, float, float, float]]) -> dict[float, float]:
    """Sum over the lags of the mean gain in log likelihood of a case, by half-life in days."""
    lags, events, expected, later, later_expected = np.array(cases).T
    counts = np.bincount(lags.astype(int))
    weights = (1 / counts)[lags.astype(int)] * (counts[lags.astype(int)] >= LEAST_CASES)
    gains = {}
    for half_life in HALF_LIVES_DAYS:
        weight = 0.5 ** ((lags + _AGE_DAYS) / half_life)
        factor = learned_factor(weight * events, weight * expected)
        gains[half_life] = float((weights * (later * np.log(factor) - (factor - 1) * later_expected)).sum())
    return gains


def main(folder: str) -> None:
    """Write the results."""
    rows: list[dict[str, Any]] = []
    together: defaultdict[str, list[tuple[int, float, float, float, float]]] = defaultdict(list)
    for family, pattern, gang in FAMILIES:
        traces = [read_trace(path) for path in sorted(Path(folder).glob(pattern))]
        pools = [count_days(trace, gang) for trace in traces if trace.nodes.max() >= gang]
        for name in ("losses", "returns"):
            cases = list(list_cases([pool[name] for pool in pools]))
            together[name] += cases
            rows.append(_row(family, name, len(pools), cases))
    for name, cases in together.items():
        rows.append(_row("all", name, sum(row["pools"] for row in rows if row["events"] == name), cases))
    lines = [f"# How long a spot pool's past tells of its future, {datetime.now(UTC):%Y-%m-%d}"]
    lines += heading("Gain in log likelihood over the prior, by half-life in days; more is better", list(rows[0]))
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    write_results("spot_memory", lines, rows)


def _row(family: str, name: str, pools: int, cases: Sequence[tuple[int, float, float, float, float]]) -> dict[str, Any]:
    gains = score(cases)
    return {
        "family": family,
        "events": name,
        "pools": pools,
        "cases": len(cases),
        "best_days": max(gains, key=lambda days: gains[days]),
        **{f"{days:g} d": round(gain, 2) for days, gain in gains.items()},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
