"""Accelerate: the YAML file of ``accelerate launch --config_file``, with FSDP2 for sharded states."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import SingleQuotedScalarString

from optimizer.contract.plan import FleetPlan
from optimizer.launch_config.engine import RENDEZVOUS_PORT, Engine, trainer_arguments

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "sgd": "sgd", "adafactor": "adafactor"}


def _further(plan: FleetPlan) -> Iterator[str]:
    split, job = plan.parallelism, plan.job
    if job.optimizer == "adafactor" and split.sharding != "ddp":
        yield f"optimizer is adafactor with {split.sharding}: its moments need whole matrices"


def _settings(plan: FleetPlan) -> dict[str, Any]:
    split, job = plan.parallelism, plan.job
    kinds = {"ddp": "MULTI_GPU" if plan.gpus > 1 else "NO", "zero1": "DEEPSPEED"}
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds.get(split.sharding, "FSDP"),
        "num_machines": plan.node_count,
        "num_processes": plan.gpus,
        "machine_rank": 0,
        "main_process_port": RENDEZVOUS_PORT,
        "rdzv_backend": "static",
        "mixed_precision": job.precision if job.precision in ("bf16", "fp16") else "no",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"} if job.compiled else {},
    }
    if split.sharding == "zero1":
        # FSDP2 shards gradients with the optimizer state; DeepSpeed's stage 1 shards the state alone
        # (https://huggingface.co/docs/accelerate/usage_guides/deepspeed).
        settings["deepspeed_config"] = {"zero_stage": 1, "gradient_accumulation_steps": split.grad_accum}
    elif split.sharding != "ddp":
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": split.sharding == "zero3",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": split.activation_checkpointing == "full",
        }
    return settings


def _write(plan: FleetPlan) -> str:
    # accelerate reads YAML 1.1, where a bare no is false.
    settings = {
        key: SingleQuotedScalarString(value) if value in ("no", "NO") else value
        for key, value in _settings(plan).items()
    }
    out = StringIO()
    YAML().dump(settings, out)
    return out.getvalue()


def environment(plan: FleetPlan) -> dict[str, str]:
    """Variables that ``accelerate launch`` would set for each rank, for a node whose torchrun is started already."""
    settings = _settings(plan)
    variables = {"ACCELERATE_MIXED_PRECISION": settings["mixed_precision"]}
    if "fsdp_config" in settings:
        variables["ACCELERATE_USE_FSDP"] = "true"
        variables |= {name.upper(): str(value) for name, value in settings["fsdp_config"].items()}
    if "deepspeed_config" in settings:
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
        variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "1"
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(plan.parallelism.grad_accum)
    return {name: value.lower() if value in ("True", "False") else value for name, value in variables.items()}


def _script(plan: FleetPlan) -> list[str]:
    # FSDP2 has checkpointing of its own; transformers refuses both together.
    is_sharded = "fsdp_config" in _settings(plan)
    words = trainer_arguments(plan, checkpoints=not is_sharded)
    optimizer = _OPTIMIZERS[plan.job.optimizer]
    if is_sharded:  # fused, it leaks: https://github.com/pytorch/pytorch/issues/188174
        optimizer = optimizer.removesuffix("_fused")
    return ["train.py", *words, "--optim", optimizer]


def _on_a_stack(plan: FleetPlan, _file: str) -> list[str]:
    variables = [f"{name}={value}" for name, value in environment(plan).items()]
    return ["--no-python", "env", *variables, "python", *_script(plan)]


def _own_launcher(plan: FleetPlan, file: str) -> str:
    nodes = "--machine_rank R --main_process_ip HOST " if plan.node_count > 1 else ""
    return f"accelerate launch --config_file {file} {nodes}{' '.join(_script(plan))}"


def _notes(plan: FleetPlan) -> Iterator[str]:
    yield "train.py is yours: transformers' Trainer and TrainingArguments, or a loop around accelerate.Accelerator"
    if plan.parallelism.sharding == "zero1":
        yield "zero1 is DeepSpeed's stage 1: deepspeed must be on the nodes (gpufleet:requirements)"
    if plan.job.seq_len > 1:
        yield f"the length of a sample, {plan.job.seq_len} tokens, is set where train.py makes them"


ENGINE = Engine(
    name="accelerate",
    version="1.15.0",
    suffix=".yaml",
    takes={
        "precision": (("fp32", "tf32", "fp16", "bf16"), "its FP8 needs another library, its weights are 32-bit"),
        "activation checkpointing": (("none", "full"), "it keeps whole layers or nothing"),
        "optimizer": (tuple(_OPTIMIZERS), "--optim has no Adam, and its 8-bit AdamW was not tried"),
    },
    lacks={
        "tensor": "its tensor and context ranks need a script that is written for them",
        "context": "its tensor and context ranks need a script that is written for them",
        "pipeline": "it splits no model into stages for training",
        "expert": "it leaves experts to the model's own code",
    },
    further=_further,
    write=_write,
    arguments=_on_a_stack,
    notes=_notes,
    own_launcher=_own_launcher,
)
