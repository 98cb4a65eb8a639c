"""The variables of a plan's training: its nodes, and its job, layout and predictions in one of them."""

from __future__ import annotations

import json
from dataclasses import replace

from bootstrap.contract.codec import to_json
from bootstrap.contract.node_env import PlanEnvironment
from bootstrap.contract.node_plan import Predicted
from optimizer.contract.plan import FleetPlan


def plan_variables(plan: FleetPlan, *, jobs: int = 1) -> PlanEnvironment:
    """Return the variables; of ``jobs`` equal ones, a worker's has its share of the plan's ranks, batch and price."""
    planned = replace(
        plan.node_plan,
        global_batch=plan.job.global_batch // jobs,
        predicted=Predicted(
            step_time_s=plan.step_time_s,
            # The last digits of an exponential differ between machines, and would make another launch template.
            step_time_p95_s=float(_number(plan.step_time_p95_s)),
            tokens_per_second=plan.tokens_per_second / jobs,
            peak_memory_gib=plan.memory.peak_gib,
        ),
        expected=plan.expected,
        deadline_hours=plan.job.deadline_hours,
        budget_usd=plan.job.budget_usd,
    )
    # ASCII without single quotes, which every reader of node.env takes alike within single quotes.
    text = json.dumps(to_json(planned), separators=(",", ":"), sort_keys=True).replace("'", "\\u0027")
    return {
        "GPUFLEET_NODE_COUNT": str(plan.node_count // jobs),
        "GPUFLEET_GPUS_PER_NODE": str(plan.node.ranks),
        "GPUFLEET_EFA_CARDS": str(plan.node.efa_cards),
        "GPUFLEET_GPUDIRECT": str(int(plan.node.needs_efa)),
        "GPUFLEET_INSTANCE_TYPE": plan.instance_type,
        "GPUFLEET_GPU": plan.node.gpu,
        "GPUFLEET_PLAN": text,
        "GPUFLEET_CHECKPOINT_INTERVAL_S": _number(plan.interruption.checkpoint_interval_s),
        "GPUFLEET_SCALE_IN_LIMIT_S": str(plan.save_limit_s),
        "GPUFLEET_PRICE_USD_PER_HOUR": _number(plan.compute_usd_per_hour / jobs),
    }


def _number(value: float) -> str:
    return format(value, ".10g")
