"""Interruptions: failures, spot reclaims, and the wait for a replacement."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from optimizer.units import HOURS_PER_MONTH

TRACES = Path(__file__).parent / "data" / "spot_traces.csv"

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, table 5; July 2024).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
FAILURE_SOURCE = "failures: arXiv:2407.21783 table 5 (419 in 54 days on 16384 GPUs), 2024-07"

# Launch, bootstrap and checkpoint load: the change-over delay of "Can't Be Late" (NSDI'24).
RESTART_HOURS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """Reclaims per running hour of one spot node, and mean hours until its pool has capacity again."""

    rate_per_node_hour: float
    wait_hours: float
    source: str


@cache
def measured_hazard(*, multi_gpu: bool) -> Hazard:
    """Hazard of V100 spot nodes in us-west-2 in October 2022 (p3.2xlarge or p3.16xlarge).

    The rate is an upper bound: a running node can outlive a dip.
    """
    traces = csv.DictReader(TRACES.read_text(encoding="utf-8").splitlines())
    rows = [row for row in traces if (int(row["gpus_per_node"]) > 1) == multi_gpu]
    interruptions = sum(int(row["interruptions"]) for row in rows)
    return Hazard(
        rate_per_node_hour=interruptions / sum(float(row["available_hours"]) for row in rows),
        wait_hours=sum(float(row["unavailable_hours"]) for row in rows) / interruptions,
        source=f"availability traces of {rows[0]['instance_type']}, us-west-2, {rows[0]['as_of']} (upper bound)",
    )


@cache
def spot_hazard(band: tuple[float, float | None] | None, *, multi_gpu: bool, as_of: str) -> Hazard:
    """Hazard of a spot pool from its Spot Advisor band: the share of instances reclaimed in a month, (low, high).

    A closed band is read at its upper end; the open band (0.20, None) and no band take the measured traces.
    """
    measured = measured_hazard(multi_gpu=multi_gpu)
    if band is None:
        return replace(measured, source=f"no Spot Advisor band; {measured.source}")
    low, high = band
    if high is None:
        rate = max(measured.rate_per_node_hour, -math.log1p(-low) / HOURS_PER_MONTH)
        source = f"Spot Advisor band >{low:.0%} a month, {as_of}, is open; {measured.source}"
    else:
        rate = -math.log1p(-high) / HOURS_PER_MONTH
        source = f"Spot Advisor band {low:.0%}-{high:.0%} a month, {as_of}, upper end"
    return Hazard(rate_per_node_hour=rate, wait_hours=measured.wait_hours, source=source)
