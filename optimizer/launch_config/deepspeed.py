"""DeepSpeed: the JSON file of ``deepspeed.initialize(config=...)`` and of transformers' ``--deepspeed``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optimizer.contract.plan import FleetPlan
from optimizer.launch_config.engine import Engine, trainer_arguments

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# torch_adam: torch's Adam, as DeepSpeed's own is compiled on the node at the first start.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "adam": {"type": "Adam", "params": {"lr": 3e-4, "torch_adam": True, "adam_w_mode": False}},
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}


def _further(plan: FleetPlan) -> Iterator[str]:
    split = plan.parallelism
    if split.tensor > 1 and split.sharding == "zero3":
        yield f"tensor parallelism is {split.tensor} with zero3: its AutoTP trains with ZeRO stages 0 to 2"
    if split.tensor > 1 and split.sequence_parallel:
        yield f"tensor parallelism is {split.tensor} with sequence parallelism, which its AutoTP does not have"


def _write(plan: FleetPlan) -> str:
    split, job = plan.parallelism, plan.job
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": split.micro_batch,
        "gradient_accumulation_steps": split.grad_accum,
        "steps_per_print": 10,
        "zero_optimization": {"stage": _STAGES[split.sharding], "overlap_comm": True, "contiguous_gradients": True},
        "bf16": {"enabled": job.precision == "bf16"},
        "fp16": {"enabled": job.precision == "fp16"},
        "optimizer": _OPTIMIZERS[job.optimizer],
    }
    if job.optimizer == "sgd":
        # ZeRO does not start with an optimizer beside Adam, Adagrad and Lion without it (runtime/zero/utils.py).
        config["zero_allow_untested_optimizer"] = True
    if split.activation_checkpointing == "full":
        config["activation_checkpointing"] = {"partition_activations": split.tensor > 1}
    if split.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": split.tensor}
    return json.dumps(config, indent=2) + "\n"


def _arguments(plan: FleetPlan, file: str) -> list[str]:
    # transformers refuses a learning rate that differs from the file's.
    rate = _OPTIMIZERS[plan.job.optimizer]["params"]["lr"]
    return ["train.py", "--deepspeed", file, *trainer_arguments(plan), "--learning_rate", str(rate)]


def _notes(plan: FleetPlan) -> Iterator[str]:
    yield "train.py is yours, with transformers' TrainingArguments; in other code deepspeed.initialize takes the file"
    if plan.job.seq_len > 1:
        yield f"the length of a sample, {plan.job.seq_len} tokens, is set where train.py makes them"


ENGINE = Engine(
    name="deepspeed",
    version="0.19.8",
    suffix=".json",
    takes={
        "precision": (("fp32", "tf32", "fp16", "bf16"), "it has no FP8 recipe, its weights are 32-bit"),
        "activation checkpointing": (("none", "full"), "it keeps whole layers or nothing"),
        "optimizer": (tuple(_OPTIMIZERS), "its file names no other of these"),
    },
    lacks={
        "context": "its long-sequence training (Ulysses) exchanges heads, which is another split with other traffic",
        "pipeline": "its pipelines take a model that is rewritten as a deepspeed.pipe.PipelineModule",
        "expert": "its experts are made in the model's code (deepspeed.moe.layer.MoE)",
    },
    further=_further,
    write=_write,
    arguments=_arguments,
    notes=_notes,
    comment="",
)
