"""The variables of a plan's training: its job, layout and predictions, as the runtime and the trainer read them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from bootstrap.contract.codec import to_json
from bootstrap.contract.node_env import PlanEnvironment
from optimizer.contract.plan import FleetPlan


def plan_variables(plan: FleetPlan, *, jobs: int = 1) -> PlanEnvironment:
    """Return the variables; of ``jobs`` equal ones, a worker's has its share of the plan's ranks, batch and price."""
    split, job = plan.parallelism, plan.job
    budget, deadline = job.budget_usd, job.deadline_hours
    return {
        "GPUFLEET_NODE_COUNT": str(plan.node_count // jobs),
        "GPUFLEET_GPUS_PER_NODE": str(plan.node.ranks),
        "GPUFLEET_EFA_CARDS": str(plan.node.efa_cards),
        "GPUFLEET_GPUDIRECT": str(int(plan.node.needs_efa)),
        "GPUFLEET_INSTANCE_TYPE": plan.instance_type,
        "GPUFLEET_GPU": plan.node.gpu,
        "GPUFLEET_ARCHITECTURE": _compact_json(job.architecture) if job.architecture else "",
        "GPUFLEET_PRECISION": job.precision,
        "GPUFLEET_OPTIMIZER": job.optimizer,
        "GPUFLEET_METHOD": job.tuning.method,
        "GPUFLEET_LORA_RANK": str(job.tuning.lora_rank),
        "GPUFLEET_LORA_ALPHA": str(job.tuning.lora_alpha),
        "GPUFLEET_LORA_TARGETS": job.tuning.lora_targets,
        "GPUFLEET_FROZEN": job.tuning.frozen,
        "GPUFLEET_COMPILED": str(int(job.compiled)),
        "GPUFLEET_GLOBAL_BATCH": str(job.global_batch // jobs),
        "GPUFLEET_STEPS": str(job.steps),
        "GPUFLEET_SHARDING": split.sharding,
        "GPUFLEET_TENSOR_PARALLEL": str(split.tensor),
        "GPUFLEET_PIPELINE_PARALLEL": str(split.pipeline),
        "GPUFLEET_CONTEXT_PARALLEL": str(split.context),
        "GPUFLEET_EXPERT_PARALLEL": str(split.expert),
        "GPUFLEET_SEQUENCE_PARALLEL": str(int(split.sequence_parallel)),
        "GPUFLEET_VIRTUAL_STAGES": str(split.virtual_stages),
        "GPUFLEET_SEQ_LEN": str(job.seq_len),
        "GPUFLEET_TARGET_LEN": str(job.target_len or ""),
        "GPUFLEET_MICRO_BATCH": str(split.micro_batch),
        "GPUFLEET_ACTIVATION_CHECKPOINTING": split.activation_checkpointing,
        "GPUFLEET_GRADIENT_COMPRESSION": split.gradient_compression,
        "GPUFLEET_STEP_TIME_S": _number(plan.step_time_s),
        "GPUFLEET_STEP_TIME_P95_S": _number(plan.step_time_p95_s),
        "GPUFLEET_TOKENS_PER_SECOND": _number(plan.tokens_per_second / jobs),
        "GPUFLEET_EXPECTED": _compact_json(to_json(plan.expected)) if plan.expected else "",
        "GPUFLEET_PEAK_MEMORY_GIB": _number(plan.memory.peak_gib),
        "GPUFLEET_CHECKPOINT_INTERVAL_S": _number(plan.interruption.checkpoint_interval_s),
        "GPUFLEET_SCALE_IN_LIMIT_S": str(plan.save_limit_s),
        "GPUFLEET_DEADLINE_HOURS": "" if deadline is None else _number(deadline),
        "GPUFLEET_BUDGET_USD": "" if budget is None else _number(budget),
        "GPUFLEET_PRICE_USD_PER_HOUR": _number(plan.compute_usd_per_hour / jobs),
    }


def _compact_json(value: Mapping[str, object]) -> str:
    # ASCII without single quotes, which every reader of node.env takes alike within single quotes.
    return json.dumps(value, separators=(",", ":"), sort_keys=True).replace("'", "\\u0027")


def _number(value: float) -> str:
    return format(value, ".10g")
