"""Outcomes: wall-clock hours of fleets, elementwise; docs/economics.md derives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from optimizer.contract.units import Z95
from optimizer.economics.checkpoint import CheckpointTimes, interval_s
from optimizer.economics.interruption import (
    FAILURES_PER_GPU_HOUR,
    KEPT_NODE_SHARE,
    RESTART_HOURS,
    fallback_share,
    gang_reclaims,
    gang_waits,
)
from optimizer.performance.types import Bools, Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleets:
    """Fleets, one an element.

    Attributes:
        train_hours: useful hours without any interruption (the estimator's median).
        log_error: standard deviation of the estimator's log error.
        fallback: on-demand nodes replace spot nodes that do not come.
        spot_rate, spot_wait_hours: reclaims an hour of one spot node, and its mean wait for capacity after one.
        usd_per_hour: of all nodes, which the interval of checkpoints weighs against their dollars.
        staging_hours: of one node's copy of the data; all nodes copy together at the start.
        checkpoint_interval_s: None for the one that loses least.
    """

    train_hours: Floats
    log_error: Floats
    nodes: Floats
    spot_nodes: Floats
    gpus_per_node: Floats
    spot_rate: Floats
    spot_wait_hours: Floats
    checkpoints: CheckpointTimes
    usd_per_hour: Floats
    fallback: Bools
    staging_hours: Floats | float = 0.0
    checkpoint_interval_s: Floats | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcomes, one an element.

    Attributes:
        hours_expected, hours_p50, hours_p95, hours_std: wall hours from launch to the last step; infinite if
            interruptions come faster than recovery.
        running_hours, waiting_hours: expected hours with all nodes, and waiting for a spot node.
        rate, expected_count: interruptions per running hour of the fleet, and of the run.
        lost_hours: expected wall hours that are not useful training.
        spot_share: share of the running hours before on-demand nodes replace the spot nodes; 1 without a fallback.
        new_nodes: expected nodes that replace another.
        staging_hours: expected wall hours that the fleet waits for copies of the data.
        checkpoints: expected number.
    """

    hours_expected: Floats
    hours_p50: Floats
    hours_p95: Floats
    hours_std: Floats
    running_hours: Floats
    waiting_hours: Floats
    rate: Floats
    expected_count: Floats
    checkpoint_interval_s: Floats
    lost_hours: Floats
    spot_share: Floats
    new_nodes: Floats
    staging_hours: Floats
    checkpoints: Floats


def predict_outcome(fleets: Fleets) -> Outcome:
    """Expected wall hours and their spread (docs/economics.md)."""
    failures = FAILURES_PER_GPU_HOUR * fleets.gpus_per_node * fleets.nodes
    reclaims = fleets.spot_rate * gang_reclaims(fleets.spot_nodes)
    rate = failures + reclaims
    # A restart on a node that stays finds its data; a new node copies it.
    kept = KEPT_NODE_SHARE * failures
    staging = np.broadcast_to(np.asarray(fleets.staging_hours, dtype=float), rate.shape)
    saves = fleets.checkpoints
    stall, interval = saves.stall_s, fleets.checkpoint_interval_s
    if interval is None:
        interval = interval_s(saves, rate, fleets.usd_per_hour)
    # An interruption strikes anywhere between two checkpoints, and the newest counts only once it is stored.
    redo_hours = (interval / 2 + saves.save_s) / 3600
    mean_factor = np.exp(fleets.log_error**2 / 2)
    useful = fleets.train_hours * mean_factor * (1 + stall / interval)
    with np.errstate(divide="ignore", invalid="ignore"):

        def run(rate: Floats, waits: Floats) -> tuple[Floats, Floats]:
            """Running and waiting hours at a rate of interruptions and hours waited per running hour."""
            progress = 1 - rate * (RESTART_HOURS + redo_hours) - (rate - kept) * staging
            running = np.where(progress > 0, useful / progress, np.inf)
            return running, np.where(waits > 0, waits * running, 0.0)

        one_waits = fleets.spot_rate * fleets.spot_wait_hours
        waits_per_hour = one_waits * gang_waits(fleets.spot_nodes)
        spot_running, spot_waiting = run(rate, waits_per_hour)
        wait_hours = np.where(reclaims > 0, waits_per_hour / reclaims, 0.0)
        fallen_running, _ = run(failures, np.zeros_like(failures))
        share, cut_wait_hours = fallback_share(spot_running, reclaims, wait_hours)
        falls = fleets.fallback & np.isfinite(spot_running)
        share, wait_hours = np.where(falls, share, 1.0), np.where(falls, cut_wait_hours, wait_hours)
        on_spot = share * spot_running
        running = np.where(falls, on_spot + (1 - share) * fallen_running, on_spot)
        spot_share = np.where(falls, on_spot / running, 1.0)
        waits = np.where(reclaims > 0, reclaims * on_spot, 0.0)
        waiting = np.where(waits > 0, waits * wait_hours, 0.0)
        start_hours = RESTART_HOURS + staging
        wall = start_hours + running + waiting
        count = failures * running + waits
        new_nodes = (failures - kept) * running + waits
        # The products may be 0 x infinity.
        copies = np.where(staging > 0, staging * new_nodes, 0.0)
        restart_hours = RESTART_HOURS + np.where(staging > 0, copies / count, 0.0)
        # E[L^2] of one loss: a restart plus a uniform part of an interval; E[W^2] of an exponential wait.
        loss_square = (restart_hours + redo_hours) ** 2 + (interval / 3600) ** 2 / 12
        # Spread of reclaims and waits from pool to pool, as one standard deviation of the hours.
        worse = sum(
            run(
                failures + fleets.spot_rate * gang_reclaims(fleets.spot_nodes, p95=True),
                one_waits * gang_waits(fleets.spot_nodes, p95=True),
            )
        )
        gang_std = np.where(fleets.spot_nodes > 1, share * (worse - spot_running - spot_waiting) / Z95, 0.0)
        # When a run falls back is chance; a share has at most the variance of a yes or no.
        fall_variance = share * (1 - share) * (spot_running + spot_waiting - fallen_running) ** 2
        variance = (
            (running + waiting) ** 2 * np.expm1(fleets.log_error**2)
            + count * loss_square
            + np.where(waits > 0, 2 * waits * wait_hours**2, 0.0)
            + gang_std**2
            + np.where(falls, fall_variance, 0.0)
        )
        std = np.sqrt(variance)
        p50, p95 = lognormal_percentiles(wall, std)
        # The median of a lognormal with rare, long losses can be below the hours of a run without any.
        p50 = np.maximum(p50, np.minimum(start_hours + fleets.train_hours * (1 + stall / interval), wall))
    return Outcome(
        hours_expected=wall,
        hours_p50=p50,
        hours_p95=p95,
        hours_std=std,
        running_hours=start_hours + running,
        waiting_hours=waiting,
        rate=rate,
        expected_count=count,
        checkpoint_interval_s=interval,
        lost_hours=wall - fleets.train_hours * mean_factor,
        spot_share=spot_share,
        new_nodes=new_nodes,
        staging_hours=staging + copies,
        checkpoints=running * 3600 / interval,
    )


def lognormal_percentiles(mean: Floats, std: Floats) -> tuple[Floats, Floats]:
    """Median and 95th percentile of a lognormal distribution.

    At one mean, the 95th percentile falls again where the log's standard deviation is above z; it counts as the highest
    of all smaller spreads, so that no fleet gains by a larger one.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        log_std = np.sqrt(np.log1p((std / mean) ** 2))
        least = np.minimum(log_std, Z95)
        p50, p95 = mean * np.exp(-(log_std**2) / 2), mean * np.exp(least * (Z95 - least / 2))
    infinite = ~np.isfinite(mean) | ~np.isfinite(std)
    return np.where(infinite, np.inf, p50), np.where(infinite, np.inf, p95)
