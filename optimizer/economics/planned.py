"""Fleets of plans: what predicted a plan's hours, read back from the plan."""

from __future__ import annotations

import numpy as np

from optimizer.contract.plan import FleetPlan
from optimizer.economics.checkpoint import Checkpoints, checkpoints
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, gang_reclaims, measured_hazard
from optimizer.economics.outcome import Fleets
from optimizer.performance.types import Floats


def column(value: float) -> Floats:
    """Return an array of one fleet's value."""
    return np.array([value], dtype=float)


def fleets_of(plan: FleetPlan) -> Fleets:
    """Return a plan's fleet; the spot rate is what ``interruption.rate`` has above failures."""
    nodes, gpus, purchase = plan.node_count, plan.node.ranks, plan.purchase
    spot_nodes = nodes - purchase.on_demand_base if purchase.option == "spot" else 0
    gang = float(gang_reclaims(column(spot_nodes))[0])
    reclaims = (plan.interruption.rate - FAILURES_PER_GPU_HOUR * gpus) * nodes
    wait_hours = plan.interruption.wait_hours
    if wait_hours is None:  # a plan of before they were written
        wait_hours = measured_hazard(multi_gpu=plan.node.gpu_count > 1).wait_hours
    return Fleets(
        train_hours=column(plan.job.steps * plan.step_time_s / 3600),
        log_error=column(plan.calibration.relative_error),
        nodes=column(nodes),
        spot_nodes=column(spot_nodes),
        gpus_per_node=column(gpus),
        spot_rate=column(max(0.0, reclaims / gang) if spot_nodes else 0.0),
        spot_wait_hours=column(wait_hours if spot_nodes else 0),
        checkpoints=planned_checkpoints(plan),
        usd_per_hour=column(0.0),  # for an interval that is chosen
        checkpoint_interval_s=column(plan.interruption.checkpoint_interval_s),
        fallback=np.array([purchase.fallback == "on-demand"]),
        staging_hours=column(plan.staging.node_hours if plan.staging else 0.0),
    )


def planned_checkpoints(plan: FleetPlan, usd: float = 0.0) -> Checkpoints:
    """Return the checkpoints of a plan's fleet, ``usd`` each, without their interval."""
    return checkpoints(
        plan.job.checkpoint_gib,
        plan.job.framework,
        nodes=column(plan.node_count),
        gpus_per_node=column(plan.node.ranks),
        writers=column(plan.checkpoint_writers),
        usd=column(usd),
    )
