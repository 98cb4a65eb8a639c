"""The variables of a plan's training: its nodes, and its job, layout and predictions in one of them."""

from __future__ import annotations

import json

from bootstrap.contract.codec import to_json
from bootstrap.contract.node_env import PlanEnvironment
from bootstrap.contract.node_plan import NodePlan, Predicted
from optimizer.contract.plan import FleetPlan


def plan_variables(plan: FleetPlan, *, jobs: int = 1) -> PlanEnvironment:
    """Return the variables; of ``jobs`` equal ones, a worker's has its share of the plan's ranks, batch and price."""
    # ASCII without single quotes, which every reader of node.env takes alike within single quotes.
    text = json.dumps(to_json(_node_plan(plan, jobs)), separators=(",", ":"), sort_keys=True).replace("'", "\\u0027")
    return {
        "GPUFLEET_NODE_COUNT": str(plan.node_count // jobs),
        "GPUFLEET_GPUS_PER_NODE": str(plan.node.ranks),
        "GPUFLEET_EFA_CARDS": str(plan.node.efa_cards),
        "GPUFLEET_GPUDIRECT": str(int(plan.node.needs_efa)),
        "GPUFLEET_INSTANCE_TYPE": plan.instance_type,
        "GPUFLEET_GPU": plan.node.gpu,
        "GPUFLEET_PLAN": text,
        "GPUFLEET_CHECKPOINT_INTERVAL_S": f"{plan.interruption.checkpoint_interval_s:.10g}",
        "GPUFLEET_SCALE_IN_LIMIT_S": str(plan.save_limit_s),
        "GPUFLEET_PRICE_USD_PER_HOUR": f"{plan.compute_usd_per_hour / jobs:.10g}",
    }


def _node_plan(plan: FleetPlan, jobs: int) -> NodePlan:
    split, job = plan.parallelism, plan.job
    return NodePlan(
        architecture=job.architecture or {},
        steps=job.steps,
        seq_len=job.seq_len,
        target_len=job.target_len or 0,
        global_batch=job.global_batch // jobs,
        micro_batch=split.micro_batch,
        precision=job.precision,
        compiled=job.compiled,
        sharding=split.sharding,
        tensor_parallel=split.tensor,
        sequence_parallel=split.sequence_parallel,
        context_parallel=split.context,
        pipeline_parallel=split.pipeline,
        virtual_stages=split.virtual_stages,
        expert_parallel=split.expert,
        activation_checkpointing=split.activation_checkpointing,
        **job.tuning.model_dump(),
        gradient_compression=split.gradient_compression,
        optimizer=job.optimizer,
        predicted=Predicted(
            step_time_s=plan.step_time_s,
            # The last digits of an exponential differ between machines, and would make another launch template.
            step_time_p95_s=float(f"{plan.step_time_p95_s:.10g}"),
            tokens_per_second=plan.tokens_per_second / jobs,
            peak_memory_gib=plan.memory.peak_gib,
        ),
        expected=plan.expected,
        deadline_hours=job.deadline_hours,
        budget_usd=job.budget_usd,
    )
