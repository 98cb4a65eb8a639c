"""Settings of the reference trainer: flags, whose defaults are the plan's (contract/node_plan.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

from bootstrap.contract.fine_tuning import METHODS, TARGETS, FineTuning
from bootstrap.contract.node_plan import VARIABLE, NodePlan
from bootstrap.contract.trainer import (
    BALANCES,
    CHECKPOINTINGS,
    DEFAULT_TARGET_POSITIONS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDINGS,
    Family,
    TrainerJob,
    data_problem,
    family_of,
    model_kind,
    span_lengths,
    unsupported,
)
from bootstrap.training.environment import node_plan
from bootstrap.training.errors import ConfigurationError

SCHEDULES = ("cosine", "linear", "wsd", "constant")
LEARNING_RATES = {"adamw": 3e-4, "adamw8bit": 3e-4, "adam": 3e-4, "adafactor": 1e-2, "sgd": 0.1}


@dataclass(frozen=True, slots=True)
class Flag:
    """Help of a flag, its words, and the node's variable that gives its default where the plan has none."""

    help: str
    words: Sequence[str] | None = None
    variable: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """One run: the plan's layout, and the settings of the training code."""

    architecture: Annotated[dict[str, Any], Flag('Hugging Face config, or {"torchvision": NAME}: JSON, or its file')]
    steps: Annotated[int, Flag("optimizer steps of the whole run")] = NodePlan.steps
    seq_len: Annotated[int, Flag("tokens of a sample, of a seq2seq model's input; 1 for images and clips")] = (
        NodePlan.seq_len
    )
    target_len: Annotated[
        int, Flag("tokens of a decoder beside an encoder; 0: span corruption's, the longest transcript")
    ] = NodePlan.target_len
    global_batch: Annotated[int, Flag("samples of one step; 0: data ranks x micro-batch x accumulation")] = (
        NodePlan.global_batch
    )
    micro_batch: Annotated[int, Flag("samples of a data rank's forward pass")] = NodePlan.micro_batch
    grad_accum: Annotated[int, Flag("forward passes of one step, where --global-batch is 0")] = 1
    shares: Annotated[str, Flag("unequal ranks: MICRO_BATCHxGRAD_ACCUM by data rank, or TYPE=... by instance type")] = (
        ""
    )
    balance: Annotated[str, Flag("measured: shares by the speed of each rank in the first steps", BALANCES)] = "none"
    precision: Annotated[str, Flag("arithmetic", PRECISIONS)] = NodePlan.precision
    compiled: Annotated[bool, Flag("torch.compile")] = NodePlan.compiled

    sharding: Annotated[str, Flag("states that data x context ranks share out", SHARDINGS)] = NodePlan.sharding
    tensor_parallel: Annotated[int, Flag("ranks that split each layer")] = NodePlan.tensor_parallel
    sequence_parallel: Annotated[bool, Flag("tensor ranks split norms and residual too")] = NodePlan.sequence_parallel
    context_parallel: Annotated[int, Flag("ranks that split each sequence")] = NodePlan.context_parallel
    pipeline_parallel: Annotated[int, Flag("must be 1")] = NodePlan.pipeline_parallel
    expert_parallel: Annotated[int, Flag("must be 1")] = NodePlan.expert_parallel
    gpus_per_node: Annotated[
        int, Flag("ranks of one node, by default those of torchrun", variable="GPUFLEET_GPUS_PER_NODE")
    ] = 1
    activation_checkpointing: Annotated[
        str, Flag("activations computed again in the backward pass", CHECKPOINTINGS)
    ] = NodePlan.activation_checkpointing

    method: Annotated[str, Flag("full, or adapters over a frozen base: lora, qlora", METHODS)] = NodePlan.method
    lora_rank: Annotated[int, Flag("rank of the adapters")] = NodePlan.lora_rank
    lora_alpha: Annotated[int, Flag("adapters' products are scaled by alpha / rank")] = NodePlan.lora_alpha
    lora_targets: Annotated[str, Flag("projections with adapters", TARGETS)] = NodePlan.lora_targets
    frozen: Annotated[str, Flag("none, embedding, or a number of first layers (the embedding too)")] = NodePlan.frozen

    gradient_compression: Annotated[str, Flag("of DDP's gradients on slow links: none, bf16, fp16, powersgd-RANK")] = (
        NodePlan.gradient_compression
    )

    optimizer: Annotated[str, Flag("optimizer", OPTIMIZERS)] = NodePlan.optimizer
    learning_rate: Annotated[float, Flag("peak rate; 0: adamw, adamw8bit, adam 3e-4, adafactor 0.01, sgd 0.1")] = 0.0
    weight_decay: Annotated[float, Flag("weight decay of matrices")] = 0.1
    clip_norm: Annotated[float, Flag("largest norm of all gradients together; 0: no clipping")] = 1.0
    schedule: Annotated[
        str, Flag("rate after the warm-up; wsd: constant, then linear over the last fifth", SCHEDULES)
    ] = "cosine"
    warmup_steps: Annotated[int, Flag("steps of linear warm-up")] = 0

    train_data: Annotated[
        str, Flag("folder, file or s3:// prefix of samples; empty: synthetic", variable="GPUFLEET_TRAIN_DATA")
    ] = ""
    weights: Annotated[
        str,
        Flag(
            "folder or s3:// prefix of safetensors to start from; random or empty: none",
            variable="GPUFLEET_BASE_WEIGHTS",
        ),
    ] = ""
    out: Annotated[str, Flag("folder of metrics, and of checkpoints without GPUFLEET_CHECKPOINT_URI")] = "trainer_out"
    evaluate_every: Annotated[int, Flag("steps between evaluations on held-out samples; 0: none")] = 0
    evaluation_steps: Annotated[int, Flag("global batches of one evaluation")] = 8
    log_every: Annotated[int, Flag("steps between log lines")] = 10
    seed: Annotated[int, Flag("seed of weights, sample order and dropout")] = 0
    deterministic: Annotated[bool, Flag("kernels that sum in one order; slower on GPUs")] = False

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
        """True where the model fixes the length of a sample: images and clips."""
        return self.family in ("cnn", "image", "speech")

    @property
    def labels(self) -> int:
        """Labels of a sample."""
        if self.family == "seq2seq":
            return self.target_len or span_lengths(self.seq_len)[1]
        if self.family == "speech":
            return self.target_len or self.longest_transcript
        return 1 if self.counts_samples else self.seq_len

    @property
    def longest_transcript(self) -> int:
        """Positions of a speech model's decoder."""
        return int(self.architecture.get("max_target_positions", DEFAULT_TARGET_POSITIONS))

    @property
    def tuning(self) -> FineTuning:
        """Part of the model that trains."""
        return FineTuning(
            method=self.method,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_targets=self.lora_targets,
            frozen=self.frozen,
        )

    def job(self) -> TrainerJob:
        """Job that the contract judges."""
        return TrainerJob(
            architecture=self.architecture or None,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=self.optimizer,
            sharding=self.sharding,
            gpus_per_node=self.gpus_per_node,
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            expert=self.expert_parallel,
            activation_checkpointing=self.activation_checkpointing,
            gradient_compression=self.gradient_compression,
            tuning=self.tuning,
            shares=self.shares,
            balance=self.balance,
        )


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> TrainerConfig:
    """Read flags over the plan and the node's variables, and refuse what the trainer does not carry out.

    Raises:
        ConfigurationError: a value that is no number, out of range, a job that ``contract/trainer.py`` refuses, or a
            part that trains over no weights.
    """
    # torchrun says how many ranks it started on this node.
    environment = {"GPUFLEET_GPUS_PER_NODE": environment.get("LOCAL_WORLD_SIZE", ""), **environment}
    config = TrainerConfig(**vars(_parser(environment).parse_args(arguments)))
    for name in (
        "steps",
        "seq_len",
        "micro_batch",
        "grad_accum",
        "log_every",
        "evaluation_steps",
        "gpus_per_node",
        "lora_rank",
        "lora_alpha",
    ):
        _check_least(config, name, 1)
    for name in (
        "global_batch",
        "target_len",
        "learning_rate",
        "clip_norm",
        "weight_decay",
        "warmup_steps",
        "evaluate_every",
    ):
        _check_least(config, name, 0)
    if not 0 <= config.seed < 2**32:  # the order of the samples takes 32 bits of it
        raise ConfigurationError(f"--seed is {config.seed}; expected 0 to {2**32 - 1}")
    if reasons := unsupported(config.job()):
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
    if config.target_len and config.family not in ("seq2seq", "speech"):
        raise ConfigurationError(f"--target-len is {config.target_len}, and {config.kind} has no decoder with targets")
    if config.family == "speech" and config.target_len > config.longest_transcript:
        raise ConfigurationError(
            f"--target-len is {config.target_len}; expected at most {config.longest_transcript}, the config's "
            "max_target_positions"
        )
    if config.train_data and (problem := data_problem(config.architecture)):
        raise ConfigurationError(
            f"--train-data is {config.train_data}, and {problem}. Leave it out to try a plan, or train with code of "
            "your own around bootstrap.training (docs/training.md)"
        )
    if config.train_data and config.family == "seq2seq" and config.target_len:
        _, targets = span_lengths(config.seq_len)
        if config.target_len != targets:
            raise ConfigurationError(
                f"--target-len is {config.target_len}, and span corruption of --train-data makes "
                f"{targets} targets beside {config.seq_len} tokens; leave --target-len out"
            )
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


def _check_least(config: TrainerConfig, name: str, least: int) -> None:
    if not least <= getattr(config, name) < math.inf:  # not a number is no less than any
        raise ConfigurationError(f"{_flag(name)} is {getattr(config, name)}; expected at least {least}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Parser whose errors end the run: by argparse's own status, torchrun would start the same command again."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; {self.prog} --help lists the flags")


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bootstrap.trainer",
        description="Train a Hugging Face model or a torchvision CNN in a plan's layout, under torchrun.",
        epilog=f"In brackets: plan, where {VARIABLE} gives the default, or its variable; and the default without it.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    converters: dict[object, Callable[[str], Any]] = {int: int, float: float, str: str}
    hints = get_type_hints(TrainerConfig, include_extras=True)
    planned = vars(node_plan(environment) or NodePlan())
    for item in dataclasses.fields(TrainerConfig):
        kind, flag = get_args(hints[item.name])
        convert: Callable[[str], Any] = converters.get(kind, _architecture)
        default = item.default if planned.get(item.name) in (None, {}) else planned[item.name]
        if flag.words and default not in flag.words:
            raise ConfigurationError(f"{VARIABLE}.{item.name} is {default!r}; expected one of {', '.join(flag.words)}")
        if text := environment.get(flag.variable, "").strip():
            try:
                default = convert(text)
            except ValueError as error:
                raise ConfigurationError(f"{flag.variable} is {text[:200]!r}: {error}") from error
        own = "" if item.default in (MISSING, "") else str(item.default)
        source = ", ".join(part for part in ("plan" if item.name in planned else flag.variable, own) if part)
        extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": convert}
        if flag.words:
            extra["choices"] = flag.words
        elif kind is not bool:
            extra["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        if default is MISSING:
            extra["required"] = True
        else:
            extra["default"] = default
        parser.add_argument(_flag(item.name), help=f"{flag.help} [{source}]" if source else flag.help, **extra)
    return parser


def _architecture(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"neither JSON nor a file that can be read ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
