"""Settings of the reference trainer: flags, whose defaults are the plan's (contract/node_plan.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from bootstrap.contract.fine_tuning import METHODS, TARGETS
from bootstrap.contract.node_plan import VARIABLE, NodePlan
from bootstrap.contract.trainer import (
    BALANCES,
    CHECKPOINTINGS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDINGS,
    Family,
    family_of,
    model_kind,
    unsupported,
)
from bootstrap.training.environment import node_plan
from bootstrap.training.errors import ConfigurationError

SCHEDULES = ("cosine", "linear", "wsd", "constant")
LEARNING_RATES = {"adamw": 3e-4, "adamw8bit": 3e-4, "adam": 3e-4, "adafactor": 1e-2, "sgd": 0.1}


@dataclass(frozen=True, slots=True)
class Flag:
    """Help of a flag, its words or least value, and the node's variable of its default where the plan has none."""

    help: str
    words: Sequence[str] | None = None
    variable: str = ""
    least: int | None = None


FLAGS = {
    "architecture": Flag('Hugging Face config, or {"torchvision": NAME}: JSON, or a file of it'),
    "steps": Flag("optimizer steps of the whole run", least=1),
    "seq_len": Flag("tokens of a sample; 1 for images", least=1),
    "global_batch": Flag("samples of one step; 0: data ranks x micro-batch x accumulation", least=0),
    "micro_batch": Flag("samples of a data rank's forward pass", least=1),
    "grad_accum": Flag("forward passes of one step, where --global-batch is 0", least=1),
    "balance": Flag("measured: micro-batches by the speed of each rank in the first steps", BALANCES),
    "precision": Flag("arithmetic", PRECISIONS),
    "compiled": Flag("torch.compile"),
    "sharding": Flag("states that data x context ranks share out", SHARDINGS),
    "tensor_parallel": Flag("ranks that split each layer", least=1),
    "sequence_parallel": Flag("tensor ranks split norms and residual too"),
    "context_parallel": Flag("ranks that split each sequence", least=1),
    "gpus_per_node": Flag(
        "ranks of one node, by default those of torchrun", variable="GPUFLEET_GPUS_PER_NODE", least=1
    ),
    "activation_checkpointing": Flag("activations computed again in the backward pass", CHECKPOINTINGS),
    "method": Flag("full, or adapters over a frozen base: lora, qlora", METHODS),
    "lora_rank": Flag("rank of the adapters", least=1),
    "lora_alpha": Flag("adapters' products are scaled by alpha / rank", least=1),
    "lora_targets": Flag("projections with adapters", TARGETS),
    "frozen": Flag("none, embedding, or a number of first layers (the embedding too)"),
    "optimizer": Flag("optimizer", OPTIMIZERS),
    "learning_rate": Flag("peak rate; 0: adamw, adamw8bit, adam 3e-4, adafactor 0.01, sgd 0.1", least=0),
    "weight_decay": Flag("weight decay of matrices", least=0),
    "clip_norm": Flag("largest norm of all gradients together; 0: no clipping", least=0),
    "schedule": Flag("rate after the warm-up; wsd: constant, then linear over the last fifth", SCHEDULES),
    "warmup_steps": Flag("steps of linear warm-up", least=0),
    "train_data": Flag("folder, file or s3:// prefix of samples; empty: synthetic", variable="GPUFLEET_TRAIN_DATA"),
    "weights": Flag("folder or s3:// prefix of safetensors to start from, or random", variable="GPUFLEET_BASE_WEIGHTS"),
    "out": Flag("folder of metrics, and of checkpoints without GPUFLEET_CHECKPOINT_URI"),
    "evaluate_every": Flag("steps between evaluations on held-out samples; 0: none", least=0),
    "evaluation_steps": Flag("global batches of one evaluation", least=1),
    "log_every": Flag("steps between log lines", least=1),
    "seed": Flag("seed of weights, sample order and dropout"),
    "deterministic": Flag("kernels that sum in one order; slower on GPUs"),
}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(NodePlan):
    """One run: the plan's job and layout, and the settings of the training code (FLAGS)."""

    grad_accum: int = 1
    balance: str = "none"
    gpus_per_node: int = 1
    learning_rate: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    train_data: str = ""
    weights: str = ""
    out: str = "trainer_out"
    evaluate_every: int = 0
    evaluation_steps: int = 8
    log_every: int = 10
    seed: int = 0
    deterministic: bool = False

    @property
    def kind(self) -> str:
        """Hugging Face's model_type, or the name of a torchvision model."""
        return model_kind(self.architecture)

    @property
    def family(self) -> Family:
        """Kind of samples and loss."""
        return family_of(self.architecture)

    @property
    def counts_samples(self) -> bool:
        """True where the model fixes the length of a sample: images."""
        return self.family in ("cnn", "image")


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> TrainerConfig:
    """Read flags over the plan and the node's variables, and refuse what the trainer does not carry out.

    Raises:
        ConfigurationError: a value that is no number, out of range, a job that ``contract/trainer.py`` refuses, or a
            part that trains over no weights.
    """
    # torchrun says how many ranks it started on this node.
    environment = {"GPUFLEET_GPUS_PER_NODE": environment.get("LOCAL_WORLD_SIZE", ""), **environment}
    plan = node_plan(environment) or NodePlan()
    config = TrainerConfig(**vars(plan) | vars(_parser(plan, environment).parse_args(arguments)))
    for name, flag in FLAGS.items():
        value = getattr(config, name)
        if flag.least is not None and not flag.least <= value < math.inf:  # not a number is no less than any
            raise ConfigurationError(f"{_flag(name)} is {value}; expected at least {flag.least}")
    if not 0 <= config.seed < 2**32:  # the order of the samples takes 32 bits of it
        raise ConfigurationError(f"--seed is {config.seed}; expected 0 to {2**32 - 1}")
    if reasons := unsupported(config, gpus_per_node=config.gpus_per_node, balance=config.balance):
        raise ConfigurationError(
            f"the trainer does not carry this out: {'; '.join(reasons)}. Take a plan of gpufleet recommend without "
            "--parallelism and --framework, or set gpufleet:trainCommand to training code of your own "
            "(gpufleet launch-config PLAN --engine torchtitan)"
        )
    parts = config.context_parallel * (config.tensor_parallel if config.sequence_parallel else 1)
    if config.seq_len % parts:
        raise ConfigurationError(
            f"--seq-len is {config.seq_len}, of which each of {parts} context and sequence-parallel ranks has a part; "
            f"give a multiple of {parts}"
        )
    if config.counts_samples and config.seq_len != 1:
        raise ConfigurationError(f"--seq-len is {config.seq_len}; expected 1: {config.kind} fixes its samples' length")
    if not (config.weights or config.tuning.trains_all):
        raise ConfigurationError(
            f"--weights names nothing, and {config.tuning.in_words} would train over random values: name the base's "
            "safetensors (a stack's gpufleet:baseWeights); --weights random tries the layout out"
        )
    if config.weights == "random":
        config = dataclasses.replace(config, weights="")
    if not config.learning_rate:
        config = dataclasses.replace(config, learning_rate=LEARNING_RATES[config.optimizer])
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Parser whose errors end the run: by argparse's own status, torchrun would start the same command again."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; {self.prog} --help lists the flags")


def _parser(plan: NodePlan, environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bootstrap.trainer",
        description="Train a Hugging Face model or a torchvision CNN in a plan's layout, under torchrun.",
        epilog=f"In brackets: plan, where {VARIABLE} gives the default, or its variable; and the default without it.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    kinds = get_type_hints(TrainerConfig)
    own_defaults: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(TrainerConfig)}
    for name, flag in FLAGS.items():
        kind = kinds[name]
        # argparse converts the text of a variable.
        default: Any = environment.get(flag.variable, "").strip() or getattr(plan, name, own_defaults[name])
        if flag.words and default not in flag.words:
            raise ConfigurationError(f"{VARIABLE}.{name} is {default!r}; expected one of {', '.join(flag.words)}")
        own = "" if own_defaults[name] in (MISSING, "") else str(own_defaults[name])
        source = ", ".join(part for part in ("plan" if hasattr(plan, name) else flag.variable, own) if part)
        convert = kind if kind in (int, float, str) else _architecture
        extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": convert}
        if flag.words:
            extra["choices"] = flag.words
        elif kind is not bool:
            extra["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        extra |= {"required": True} if default == {} else {"default": default}
        parser.add_argument(_flag(name), help=f"{flag.help} [{source}]" if source else flag.help, **extra)
    return parser


def _architecture(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"neither JSON nor a file that can be read ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
