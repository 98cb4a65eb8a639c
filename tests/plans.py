"""FleetPlans for tests: a valid one, and variations of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from optimizer.contract.plan import FleetPlan, PlanError, plan_from_dict

# Architecture that the reference trainer builds a model from.
LLAMA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 32, "intermediate_size": 11008}
SPOT_P4D: dict[str, Any] = {
    "schema_version": 1,
    "instance_type": "p4d.24xlarge",
    "region": "us-east-1",
    "zone_ids": ["use1-az2", "use1-az6"],
    "node_count": 2,
    "node": {
        "gpu": "A100",
        "gpu_count": 8,
        "gpu_memory_gib": 40,
        "vcpus": 96,
        "memory_gib": 1152,
        "nvme_gb": 8000,
        "network_gbit_per_s": 400,
        "network_cards": 4,
        "efa_cards": 4,
        "gpudirect": True,
        "interconnect": "nvswitch",
        "cpu_architecture": "x86_64",
    },
    "volumes": {"root_gib": 200, "iops": 3000, "throughput_mib_per_s": 250},
    "purchase": {"option": "spot", "on_demand_base": 1, "fallback": "none", "capacity_reservation_id": None},
    "job": {
        "model": "llama-2-7b",
        "parameters": 6738415616,
        "samples": 256000,
        "tokens": 524288000,
        "seq_len": 2048,
        "global_batch": 128,
        "steps": 2000,
        "precision": "bf16",
        "optimizer": "adamw",
        "checkpoint_gib": 75.3,
        "checkpoints_kept": 3,
        "budget_usd": 3000,
        "deadline_hours": 48,
    },
    "parallelism": {
        "data": 16,
        "sharding": "zero3",
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "micro_batch": 4,
        "grad_accum": 2,
        "activation_checkpointing": "full",
    },
    "memory": {
        "peak_gib": 30.0,
        "p95_gib": 30.0,
        "limit_gib": 38.0,
        "breakdown": {"states": 10.0, "activations": 20.0},
    },
    "step_time_s": 7.2,
    "tokens_per_second": 36408.9,
    "mfu": 0.35,
    "hours": {"expected": 4.5, "p50": 4.4, "p95": 5.2},
    "cost_usd": {
        "expected": 100.0,
        "p50": 98.0,
        "p95": 120.0,
        "breakdown": {"compute": 95.0, "volumes": 2.0, "storage": 2.0, "transfer": 1.0, "head_node": 0.0},
    },
    "interruption": {
        "rate": 0.0002,
        "source": "test",
        "wait_hours": 1.0247005988023952,
        "expected_count": 0.002,
        "checkpoint_interval_s": 600,
        "checkpoint_stall_s": 0.0,
        "checkpoint_save_s": 0.0,
        "checkpoint_usd": 0.0,
        "lost_hours": 0.01,
    },
    "prices": [
        {
            "item": "spot p4d.24xlarge us-east-1",
            "usd": 10.0,
            "per": "hour",
            "source": "test",
            "as_of": "2026-01-21",
        },
        {
            "item": "on-demand p4d.24xlarge us-east-1",
            "usd": 21.96,
            "per": "hour",
            "source": "test",
            "as_of": "2026-07-20",
        },
    ],
    "calibration": {"source": "test", "relative_error": 0.1, "rows": 10},
}

# Places for SPOT_P4D: the other zone on demand, and a type with more memory.
ON_DEMAND_P4D: dict[str, Any] = {
    "zone_id": "use1-az6",
    "instance_type": "p4d.24xlarge",
    "purchase": "on-demand",
    "price": SPOT_P4D["prices"][1],
    **{name: SPOT_P4D[name] for name in ("step_time_s", "tokens_per_second", "hours", "cost_usd", "interruption")},
}
SPOT_P4DE: dict[str, Any] = ON_DEMAND_P4D | {
    "instance_type": "p4de.24xlarge",
    "purchase": "spot",
    "price": SPOT_P4D["prices"][0] | {"item": "spot p4de.24xlarge us-east-1", "usd": 14.0},
    "node": SPOT_P4D["node"] | {"gpu_memory_gib": 80},
    "memory": SPOT_P4D["memory"] | {"limit_gib": 76.0},
    "calibration": SPOT_P4D["calibration"],
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, dictionaries inside dictionaries too."""
    out = dict(base)
    for key, value in changes.items():
        inside = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if inside else value
    return out


def sample_plan(**changes: Any) -> FleetPlan:
    """A valid plan (two spot p4d.24xlarge, one of them on demand), with ``changes`` laid over it."""
    return plan_from_dict(merged(SPOT_P4D, changes)).seal()


def sealed(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with its digest; a wrong one as it is."""
    with suppress(PlanError):
        return plan | {"digest": plan_from_dict(plan | {"digest": ""}).seal().digest}
    return plan
