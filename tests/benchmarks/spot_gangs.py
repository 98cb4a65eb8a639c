"""Gangs of spot nodes: how often a gang breaks and how long it waits, beside one of its nodes.

``python -m tests.benchmarks.spot_gangs FOLDER`` reads the multi-node traces of FOLDER (AWS V100 of 2023 from
github.com/skypilot-org/spot-traces, and the 13 H100 zones of another cloud of 2025) and writes
``results/spot_gangs_<yyyymm>.csv`` and ``.md``. The exponents are GANG_RECLAIMS and GANG_WAITS of
optimizer/economics/interruption.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.economics.simulation.traces import Trace, read_trace
from tests.benchmarks.spot_zones import heading, write_results

# (family, traces, gangs): the largest gang of a pool gives its exponent.
FAMILIES = (
    ("AWS 2023, V100", "availability*", (2, 4, 8, 12, 16)),
    ("AWS 2023, V100", "preemption_4*", (2, 4)),
    ("H100 2025", "gcp*", (2, 4, 8, 12, 16)),
)
# Fewer events and less capacity say nothing.
LEAST_EVENTS, LEAST_SHARE = 5, 0.05
_Z95 = 1.645


def measure(family: str, trace: Trace, gangs: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row a gang: losses and waits of a pool's gang beside one node, and the exponents that they mean."""
    hours, nodes = trace.gap_s / 3600, trace.nodes
    lost = np.maximum(-np.diff(nodes), 0).sum()
    node_rate = float(lost / (nodes.sum() * hours))
    one = nodes >= 1
    droughts = (one[:-1] & ~one[1:]).sum()
    if not droughts or not lost:
        return
    node_wait = float((~one).sum() * hours / droughts)
    for gang in gangs:
        has = nodes >= gang
        broken = int((has[:-1] & ~has[1:]).sum())
        if has.mean() < LEAST_SHARE or broken < LEAST_EVENTS:
            continue
        breaks = broken / (has.sum() * hours) / node_rate
        waits = (~has).sum() / has.sum() / (node_rate * node_wait)
        yield {
            "family": family,
            "pool": trace.name.removesuffix(".json"),
            "gang": gang,
            "events": broken,
            "node_per_hour": round(node_rate, 4),
            "node_wait_hours": round(node_wait, 3),
            "breaks_ratio": round(float(breaks), 3),
            "waits_ratio": round(float(waits), 3),
            "breaks_exponent": round(float(np.log(breaks) / np.log(gang)), 3),
            "waits_exponent": round(float(np.log(waits) / np.log(gang)), 3),
        }


def largest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of each pool's largest gang."""
    return list({row["pool"]: row for row in sorted(rows, key=lambda row: int(row["gang"]))}.values())


def fit(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    """Mean of the pools' exponents, and the 95th percentile of another pool's."""
    values = np.array([float(row[f"{name}_exponent"]) for row in largest(rows)])
    return float(values.mean()), float(values.mean() + _Z95 * values.std(ddof=1))


def main(folder: str) -> None:
    """Write the results."""
    rows = [
        row
        for family, pattern, gangs in FAMILIES
        for path in sorted(Path(folder).glob(pattern))
        for row in measure(family, read_trace(path), gangs)
    ]
    lines = [f"# Gangs of spot nodes, {datetime.now(UTC):%Y-%m-%d}"]
    lines += heading(
        "A gang of N breaks N^a times as often as one node and waits N^c times as long: fit and judgement",
        ("fitted on", "of", "pools", "mean", "p95", "judged on", "pools within p95"),
    )
    families = [*dict.fromkeys(family for family, _, _ in FAMILIES), ""]
    for name in ("breaks", "waits"):
        for family in families:
            fitted = [row for row in rows if family in (row["family"], "")]
            judged = largest([row for row in rows if row["family"] != family])
            mean, p95 = fit(fitted, name)
            within = sum(row[f"{name}_exponent"] <= p95 for row in judged)
            others = ", ".join(dict.fromkeys(row["family"] for row in judged)) if family else "itself"
            cells = (family or "both", name, len(largest(fitted)), f"{mean:.2f}", f"{p95:.2f}", others)
            lines.append(f"| {' | '.join(map(str, cells))} | {within} of {len(judged)} |")
    lines += heading("Pools", list(rows[0]))
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    write_results("spot_gangs", lines, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
