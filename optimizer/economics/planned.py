"""A plan's numbers: its hours, dollars, interruptions and copies from what was worked out, and its fleet read back."""

from __future__ import annotations

import numpy as np

from optimizer.contract.plan import Cost, CostBreakdown, FleetPlan, Interruption, PlannedLustre, Spread, Staging
from optimizer.contract.units import HOURS_PER_MONTH, cents, rounded
from optimizer.economics.checkpoint import CheckpointTimes, checkpoints
from optimizer.economics.fleet_cost import FleetCost
from optimizer.economics.interruption import FAILURE_SOURCE, FAILURES_PER_GPU_HOUR, Hazard, gang_reclaims
from optimizer.economics.outcome import Fleets, Outcome
from optimizer.economics.running_costs import RunningCosts
from optimizer.economics.staging import NodeCopy
from optimizer.performance.types import Floats


def describe_hours(outcome: Outcome, row: int) -> Spread:
    """Hours of a run."""
    return Spread(**{name: rounded(getattr(outcome, f"hours_{name}")[row]) for name in Spread.model_fields})


def describe_cost(cost: FleetCost, row: int) -> Cost:
    """Dollars of a run; the parts add up to the cent."""
    breakdown = CostBreakdown(**{part: cents(getattr(cost, part)[row]) for part in CostBreakdown.model_fields})
    expected, p50 = cents(breakdown.total()), cents(cost.p50[row])
    return Cost(expected=expected, p50=p50, p95=max(cents(cost.p95[row]), expected, p50), breakdown=breakdown)


def describe_interruption(
    outcome: Outcome, saves: CheckpointTimes, row: int, *, nodes: int, hazard: Hazard | None
) -> Interruption:
    """Interruptions of a run on ``nodes`` nodes, whose spot nodes have a hazard."""
    return Interruption(
        rate=rounded(float(outcome.rate[row]) / nodes),
        source=f"{hazard.source}; {FAILURE_SOURCE}" if hazard else FAILURE_SOURCE,
        wait_hours=rounded(hazard.wait_hours) if hazard else None,
        expected_count=rounded(outcome.expected_count[row]),
        checkpoint_interval_s=rounded(outcome.checkpoint_interval_s[row]),
        checkpoint_stall_s=rounded(saves.stall_s[row]),
        checkpoint_save_s=rounded(saves.save_s[row]),
        checkpoint_usd=rounded(saves.usd[row]),
        lost_hours=rounded(outcome.lost_hours[row]),
    )


def describe_staging(
    copy: NodeCopy, usd: RunningCosts, outcome: Outcome, cost: FleetCost, row: int, *, nodes: int
) -> Staging:
    """Copies of the data to ``nodes`` nodes and those that replace them."""
    hours, all_hours = float(outcome.staging_hours[row]), float(outcome.hours_expected[row])
    copies = nodes + float(outcome.new_nodes[row])
    stored_usd = usd.data_usd_per_month / HOURS_PER_MONTH * all_hours
    return Staging(
        data_gib=copy.data_gib,
        files=copy.files,
        node_hours=rounded(copy.hours),
        gib_per_s=rounded(copy.gib_per_s),
        bound=copy.bound,
        source=copy.source,
        hours=rounded(hours),
        compute_usd=cents(float(cost.compute[row]) * hours / all_hours),
        storage_usd=cents(stored_usd + copy.requests * usd.read_request_usd * copies),
        data_region=usd.data_region,
        transfer_usd=cents(usd.carry_usd * copies),
    )


def describe_lustre(usd: RunningCosts, storage_gib: int, data_gib: float, hours: float) -> PlannedLustre:
    """File system of the data over a run of so many hours."""
    return PlannedLustre(
        storage_gib=storage_gib, data_gib=data_gib, usd=cents(usd.lustre_usd_per_month * hours / HOURS_PER_MONTH)
    )


def column(value: float) -> Floats:
    """Return an array of one fleet's value."""
    return np.array([value], dtype=float)


def fleets_of(plan: FleetPlan) -> Fleets:
    """Return a plan's fleet; the spot rate is what ``interruption.rate`` has above failures."""
    nodes, gpus, purchase = plan.node_count, plan.node.ranks, plan.purchase
    spot_nodes = nodes - purchase.on_demand_base if purchase.option == "spot" else 0
    gang = float(gang_reclaims(column(spot_nodes))[0])
    reclaims = (plan.interruption.rate - FAILURES_PER_GPU_HOUR * gpus) * nodes
    return Fleets(
        train_hours=column(plan.job.steps * plan.step_time_s / 3600),
        log_error=column(plan.calibration.relative_error),
        nodes=column(nodes),
        spot_nodes=column(spot_nodes),
        gpus_per_node=column(gpus),
        spot_rate=column(max(0.0, reclaims / gang) if spot_nodes else 0.0),
        spot_wait_hours=column(plan.interruption.wait_hours or 0.0),
        checkpoints=checkpoints(
            plan.job.checkpoint_gib,
            plan.job.framework,
            nodes=column(nodes),
            gpus_per_node=column(gpus),
            writers=column(plan.checkpoint_writers),
            usd=column(0.0),
        ),
        usd_per_hour=column(0.0),  # for an interval that is chosen
        checkpoint_interval_s=column(plan.interruption.checkpoint_interval_s),
        fallback=np.array([purchase.fallback == "on-demand" and purchase.option == "spot"]),
        staging_hours=column(plan.staging.node_hours if plan.staging else 0.0),
    )
