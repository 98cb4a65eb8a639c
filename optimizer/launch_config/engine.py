"""Contract of an engine, and the facts that all configurations take from a plan in the same way."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from bootstrap.contract.trainer import TORCHVISION
from optimizer.contract.plan import FleetPlan
from optimizer.workload.huggingface import model_from_config
from optimizer.workload.model import ModelSpec

# The agent's port; any free one does elsewhere.
RENDEZVOUS_PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine.

    Attributes:
        version: release that the configurations were checked against.
        takes: by a part of the plan, the values that the engine has, and why it has no other.
        lacks: kinds of parallelism that it does not have, each with the reason.
        further: other parts of the plan that it cannot carry out.
        write: configuration of a plan, without the header.
        arguments: arguments of torchrun after its own, given the plan and the configuration's file name.
        notes: further lines of the header.
        own_launcher: the engine's own launch line for one node of several, beside torchrun's; None without one.
        comment: start of a comment line; empty where the format has none.
    """

    name: str
    version: str
    suffix: str
    takes: Mapping[str, tuple[Sequence[str], str]]
    lacks: Mapping[str, str] = field(default_factory=dict)
    further: Callable[[FleetPlan], Iterable[str]]
    write: Callable[[FleetPlan], str]
    arguments: Callable[[FleetPlan, str], Sequence[str]]
    notes: Callable[[FleetPlan], Iterable[str]]
    own_launcher: Callable[[FleetPlan, str], str] | None = None
    comment: str = "# "

    def refusals(self, plan: FleetPlan) -> list[str]:
        """Parts of the plan that the engine cannot carry out."""
        split, job = plan.parallelism, plan.job
        parts = {
            "sharding": split.sharding,
            "precision": job.precision,
            "activation checkpointing": split.activation_checkpointing,
            "optimizer": job.optimizer,
        }
        lacking = [name for name in split.beyond_data if name in self.lacks]
        return [
            *(f"{name} parallelism is {getattr(split, name)}: {self.lacks[name]}" for name in lacking),
            *(
                f"{part} is {parts[part]}, and it has {', '.join(known)}: {why}"
                for part, (known, why) in self.takes.items()
                if parts[part] not in known
            ),
            *self.further(plan),
        ]

    def text(self, plan: FleetPlan, file_name: str) -> str:
        """Configuration with the launch lines as comments, where the format has comments."""
        if not self.comment:
            return self.write(plan)
        header = "".join(f"{self.comment}{line}\n" for line in (self._title(plan), *self.launch_lines(plan, file_name)))
        return header + self.write(plan)

    def launch_lines(self, plan: FleetPlan, file_name: str) -> list[str]:
        """Notes, and the exact lines that start the engine with this configuration."""
        name = PurePath(file_name).name
        arguments = shlex.join(self.arguments(plan, name))
        elsewhere = f"torchrun {_torchrun_arguments(plan)} {arguments}"
        if self.own_launcher is not None:
            elsewhere = self.own_launcher(plan, name)
        return [
            *self.notes(plan),
            f"on a gpufleet stack: put {name} into gpufleet:trainDir, then",
            f"  pulumi config set gpufleet:trainCommand -- {shlex.quote(arguments)}",
            "elsewhere, on each node (HOST: the first node; R: this node's number from 0):",
            f"  {elsewhere}",
        ]

    def _title(self, plan: FleetPlan) -> str:
        split = plan.parallelism
        return (
            f"{self.name} {self.version}: {plan.job.model} on {plan.node_count} x {plan.instance_type}, "
            f"{split.in_short} {split.sharding}, micro-batch {split.micro_batch}, accumulation {split.grad_accum}, "
            f"activation checkpointing {split.activation_checkpointing}; written by gpufleet launch-config"
        )


def _torchrun_arguments(plan: FleetPlan) -> str:
    nodes = f"--nnodes {plan.node_count} --nproc-per-node {plan.node.ranks}"
    if plan.node_count == 1:
        return f"--standalone {nodes}"
    return f"{nodes} --node-rank R --rdzv-backend static --rdzv-endpoint HOST:{RENDEZVOUS_PORT}"


def checkpoint_interval_steps(plan: FleetPlan) -> int:
    """Steps between checkpoints, at least 1."""
    return max(1, round(plan.interruption.checkpoint_interval_s / plan.step_time_s))


def read_model(plan: FleetPlan) -> ModelSpec | None:
    """Read the model of a plan's Hugging Face config; None without one."""
    architecture = plan.job.architecture
    if architecture is None or TORCHVISION in architecture:
        return None
    return model_from_config(dict(architecture), name=plan.job.model, origin="the plan")


def trainer_arguments(plan: FleetPlan, *, checkpoints: bool = True) -> list[str]:
    """Arguments of a script that parses transformers' TrainingArguments, for what no configuration file carries.

    ``checkpoints``: the script recomputes activations where the plan does.
    """
    split, job = plan.parallelism, plan.job
    words = ["--max_steps", str(job.steps), "--per_device_train_batch_size", str(split.micro_batch)]
    words += ["--gradient_accumulation_steps", str(split.grad_accum)]
    words += ["--save_strategy", "steps", "--save_steps", str(checkpoint_interval_steps(plan))]
    words += ["--save_total_limit", str(job.checkpoints_kept)]
    if checkpoints and split.activation_checkpointing == "full":
        words += ["--gradient_checkpointing", "true"]
    if job.precision in ("bf16", "fp16", "tf32"):
        words += [f"--{job.precision}", "true"]
    if job.compiled:
        words += ["--torch_compile", "true"]
    return words
