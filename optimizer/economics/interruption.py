"""Interruptions: failures, spot reclaims, and the wait for a replacement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np

from bootstrap.contract.capacity import PoolEvents
from bootstrap.contract.pools import learned_factor
from bootstrap.contract.settings import DEFAULT_GANG_WINDOW_MINUTES
from optimizer.catalog.gpus import read_table
from optimizer.contract.hardware import InterruptionBand, LearnedPool
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.performance.types import Floats

TRACES = Path(__file__).parent / "data" / "spot_traces.csv"

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (arXiv:2407.21783, table 5; July 2024).
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
FAILURE_SOURCE = "failures: arXiv:2407.21783 table 5 (419 in 54 days on 16384 GPUs), 2024-07"

# Software bugs among these 419: the node stays, with the data on its disk. Every other failure counts as a new node.
KEPT_NODE_SHARE = 54 / 419

# Launch, bootstrap and checkpoint load: the change-over delay of "Can't Be Late" (NSDI'24).
RESTART_HOURS = 0.2

# Reclaims of one pool come together: N spot nodes break N^a times as often as one, and wait N^c times as long in all.
# (mean, 95th percentile) of the exponents over 17 pools of V100 on AWS (2023) and H100 on another cloud (2025), at
# gangs of 4 to 16: tests/benchmarks/results/spot_gangs_202611.md. The reclaims' exponent holds from one family of
# pools to the other. The waits' does not (0.07 and 0.52): it is the dearer family's, with the pooled 95th percentile,
# rounded up.
GANG_RECLAIMS = (0.17, 0.43)
GANG_WAITS = (0.52, 1.0)
# Largest gang that was measured; at the 95th percentile, the reclaims of more nodes add up.
_MEASURED_GANG = 16

# Days in which a pool's past events lose half of what they tell of its next ones: the best of 0.5 to 365 over 30 pools,
# seen for at most 27 days (tests/benchmarks/results/spot_memory_202611.md).
HALF_LIFE_DAYS = 10.0

# The controller's wait for spot before it buys on demand (bootstrap/controller/phases.py); refusals end it earlier.
FALLBACK_AFTER_HOURS = DEFAULT_GANG_WINDOW_MINUTES / 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """Reclaims per running hour of one spot node, and mean hours until its pool has capacity again."""

    rate_per_node_hour: float
    wait_hours: float
    source: str


def gang_reclaims(spot_nodes: Floats, *, p95: bool = False) -> Floats:
    """Ratio of a gang's spot reclaims to a single node's; 0 without spot nodes."""
    nodes = np.maximum(spot_nodes, 1.0)
    if p95:
        factor = np.minimum(nodes, _MEASURED_GANG) ** GANG_RECLAIMS[1] * np.maximum(nodes / _MEASURED_GANG, 1.0)
    else:
        factor = nodes ** GANG_RECLAIMS[0]
    return np.where(spot_nodes > 0, factor, 0.0)


def gang_waits(spot_nodes: Floats, *, p95: bool = False) -> Floats:
    """Ratio of a gang's hours without spot capacity to a single node's; 0 without spot nodes."""
    return np.where(spot_nodes > 0, np.maximum(spot_nodes, 1.0) ** GANG_WAITS[p95], 0.0)


def fallback_share(running_hours: Floats, reclaims_per_hour: Floats, wait_hours: Floats) -> tuple[Floats, Floats]:
    """Expected share of a run's work on spot where on-demand nodes replace spot that does not come, to the end.

    The controller falls back when a wait for capacity, the first launch's too, outlasts the gang window. Waits are
    exponential with their mean; the pool is empty at the launch as often as its waits take of the time.

    Args:
        running_hours: hours with all nodes, if all are on spot.
        reclaims_per_hour: of the gang.
        wait_hours: mean wait after a reclaim.

    Returns:
        The share, and the mean wait that the window cuts off, h.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        outlasts = np.where(wait_hours > 0, np.exp(-FALLBACK_AFTER_HOURS / wait_hours), 0.0)
        waits = reclaims_per_hour * wait_hours
        at_launch = waits / (1 + waits) * outlasts
        falls = reclaims_per_hour * outlasts * running_hours
        # Mean share of the run before an event of that rate.
        before = np.where(falls > 0, -np.expm1(-falls) / falls, 1.0)
    return np.where(np.isfinite(running_hours), (1 - at_launch) * before, 0.0), wait_hours * (1 - outlasts)


@cache
def measured_hazard(*, multi_gpu: bool) -> Hazard:
    """Hazard of V100 spot nodes in us-west-2 in October 2022 (p3.2xlarge or p3.16xlarge).

    The rate is an upper bound: a running node can outlive a dip.
    """
    rows = [row for row in read_table(TRACES, dict) if (int(row["gpus_per_node"]) > 1) == multi_gpu]
    interruptions = sum(int(row["interruptions"]) for row in rows)
    return Hazard(
        rate_per_node_hour=interruptions / sum(float(row["available_hours"]) for row in rows),
        wait_hours=sum(float(row["unavailable_hours"]) for row in rows) / interruptions,
        source=f"availability traces of {rows[0]['instance_type']}, us-west-2, {rows[0]['as_of']} (upper bound)",
    )


@cache
def spot_hazard(band: InterruptionBand | None, *, multi_gpu: bool) -> Hazard:
    """Hazard of a spot pool from its Spot Advisor band: the share of instances reclaimed in a month.

    A closed band is read at its upper end; the open band ">20%" and no band take the measured traces.
    """
    measured = measured_hazard(multi_gpu=multi_gpu)
    if band is None:
        return replace(measured, source=f"no Spot Advisor band; {measured.source}")
    low, high, _, as_of = band
    if high is None:
        rate = max(measured.rate_per_node_hour, -math.log1p(-low) / HOURS_PER_MONTH)
        source = f"Spot Advisor band >{low:.0%} a month, {as_of}, is open; {measured.source}"
    else:
        rate = -math.log1p(-high) / HOURS_PER_MONTH
        source = f"Spot Advisor band {low:.0%}-{high:.0%} a month, {as_of}, upper end"
    return Hazard(rate_per_node_hour=rate, wait_hours=measured.wait_hours, source=source)


def event_weight(events: PoolEvents, now: datetime) -> float:
    """Return what is left at ``now`` of the weight of a pool's events, spread evenly from the first to the last."""
    first, last = (
        max((now - at).total_seconds(), 0.0) / 86400 / HALF_LIFE_DAYS for at in (events.first_at, events.last_at)
    )
    if first - last < 1e-6:
        return float(0.5**last)
    return float(0.5**last - 0.5**first) / ((first - last) * math.log(2))


def learn_hazard(prior: Hazard, pools: Sequence[LearnedPool], now: datetime) -> Hazard:
    """Update a pool's hazard with the events that the user's own stacks saw in it, each by its age.

    A gang's reclaims and waits are counted together, so each is compared with those that the prior expects of a gang.
    """
    reclaims = returns = 0
    hours = empty_hours = kept_reclaims = kept_returns = expected_reclaims = expected_returns = 0.0
    for pool in pools:
        seen, weight = pool.events, event_weight(pool.events, now)
        # A drought that lasts has been seen up to its last refusal.
        lasting = (
            (seen.empty_at - seen.empty_since).total_seconds() / 3600 if seen.empty_at and seen.empty_since else 0.0
        )
        nodes = np.array([seen.node_hours / seen.hours if seen.hours else 1.0, seen.asked])
        running, waiting = gang_reclaims(nodes)
        gang_wait_hours = prior.wait_hours * gang_waits(nodes)[1] / waiting
        reclaims, returns = reclaims + seen.reclaims, returns + seen.returns
        hours, empty_hours = hours + seen.hours, empty_hours + seen.empty_hours + lasting
        kept_reclaims, kept_returns = kept_reclaims + weight * seen.reclaims, kept_returns + weight * seen.returns
        expected_reclaims += weight * prior.rate_per_node_hour * float(running) * seen.hours
        expected_returns += weight * (seen.empty_hours + lasting) / float(gang_wait_hours)
    if not hours and not empty_hours:
        return prior
    origins = ", ".join(dict.fromkeys(pool.origin for pool in pools))
    first, last = min(pool.events.first_at for pool in pools), max(pool.events.last_at for pool in pools)
    seen_text = f"{reclaims} reclaims in {hours:.0f} h, {returns} returns in {empty_hours:.1f} h without capacity"
    return Hazard(
        rate_per_node_hour=prior.rate_per_node_hour * learned_factor(kept_reclaims, expected_reclaims),
        wait_hours=prior.wait_hours / learned_factor(kept_returns, expected_returns),
        source=f"{prior.source}; learned from {origins}, {first:%Y-%m-%d} to {last:%Y-%m-%d}: {seen_text}, "
        f"halved every {HALF_LIFE_DAYS:g} days",
    )
