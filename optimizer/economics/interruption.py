"""Interruptions: how often a node is lost, and how long its replacement takes.

Two causes add up. Hardware and software failures strike every purchase option; spot reclaims strike spot nodes only.
A job is one gang: losing any node stops all of them, so the rates of the nodes add up.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optimizer.units import HOURS_PER_MONTH

TRACES = Path(__file__).parent / "data" / "spot_traces.csv"

# Llama 3 405B pre-training: 419 unexpected interruptions in 54 days on 16,384 H100
# (arXiv:2407.21783, section 3.3.4, table 5; July 2024).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
FAILURE_SOURCE = "failures: arXiv:2407.21783 table 5 (419 in 54 days on 16384 GPUs), 2024-07"

# Launch, bootstrap and checkpoint load, once there is capacity: the change-over delay that "Can't Be Late" (NSDI'24)
# takes for its comparison of spot policies.
RESTART_HOURS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """Hazard of one spot node.

    Attributes:
        rate_per_node_hour: hazard rate, reclaims per running node-hour.
        wait_hours: mean time until the pool has capacity again, hours.
        source: sources of both, with dates.
    """

    rate_per_node_hour: float
    wait_hours: float
    source: str


@cache
def _traces() -> tuple[dict[str, str], ...]:
    text = TRACES.read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def measured_hazard(*, multi_gpu: bool) -> Hazard:
    """Hazard of V100 spot nodes in us-west-2 in October 2022, by node size (p3.2xlarge or p3.16xlarge).

    The traces record, tick by tick, whether a pool had capacity. A running node can outlive a dip, so the rate is an
    upper bound for those pools.
    """
    rows = [row for row in _traces() if (int(row["gpus_per_node"]) > 1) == multi_gpu]
    interruptions = sum(int(row["interruptions"]) for row in rows)
    return Hazard(
        rate_per_node_hour=interruptions / sum(float(row["available_hours"]) for row in rows),
        wait_hours=sum(float(row["unavailable_hours"]) for row in rows) / interruptions,
        source=f"availability traces of {rows[0]['instance_type']}, us-west-2, {rows[0]['as_of']} (upper bound)",
    )


@cache
def spot_hazard(band: tuple[float, float | None] | None, *, multi_gpu: bool, as_of: str) -> Hazard:
    """Hazard of a spot pool from its Spot Advisor band, read at the band's unfavourable end.

    A closed band such as (0.05, 0.10) is a share of instances reclaimed in a month; a constant rate r loses
    1 - exp(-730 r) of them. The open band (0.20, None) has no unfavourable end, and a pool without a band no evidence:
    both take the measured traces of a pool in the open band.

    Args:
        band: share of instances interrupted in a month, (low, high).
        multi_gpu: a node has more than one GPU; larger nodes are reclaimed more often.
        as_of: date of the band, for the source text.
    """
    measured = measured_hazard(multi_gpu=multi_gpu)
    if band is None:
        return Hazard(
            rate_per_node_hour=measured.rate_per_node_hour,
            wait_hours=measured.wait_hours,
            source=f"no Spot Advisor band; {measured.source}",
        )
    if band[1] is None:
        return Hazard(
            rate_per_node_hour=max(measured.rate_per_node_hour, -math.log1p(-band[0]) / HOURS_PER_MONTH),
            wait_hours=measured.wait_hours,
            source=f"Spot Advisor band >{band[0]:.0%} a month, {as_of}, is open; {measured.source}",
        )
    return Hazard(
        rate_per_node_hour=-math.log1p(-band[1]) / HOURS_PER_MONTH,
        wait_hours=measured.wait_hours,
        source=f"Spot Advisor band {band[0]:.0%}-{band[1]:.0%} a month, {as_of}, upper end",
    )
