"""Profiles of training code (data/frameworks.toml), by the names of runs and requests."""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Precision
from optimizer.performance.kernels import FlashKernel
from optimizer.workload.model import ModelSpec
from optimizer.workload.named_entries import read_entries

FRAMEWORKS = Path(__file__).parent / "data" / "frameworks.toml"

DEFAULT = "torch"
CNN_DEFAULT = "torchvision"
TRAINER = "gpufleet"  # the reference trainer
# Other names of the same code, and libraries on top.
ALIASES = {
    "transformers": "torch",
    "pytorch": "torch",
    "huggingface": "torch",
    "hf": "torch",
    "accelerate": "torch",
    "trl": "torch",
    "axolotl": "torch",
    "torchtune": "torchtitan",
    "megatron-bridge": "nemo",
    "gpt-neox": "megatron-deepspeed",
    "llm-foundry": "composer-fsdp",
    "composer": "composer-fsdp",
    "megatron-lm": "megatron",
    "deepspeed": "megatron-deepspeed",
}


# Code with Megatron's layouts.
MEGATRON = ("megatron", "megatron-core", "nemo", "nemo-fp32")


class Framework(BaseModel):
    """One profile; frameworks.toml documents its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight_bytes: float = Field(ge=0)
    master_bytes: float = Field(ge=0)
    gradient_bytes: float = Field(ge=0)
    cast_bytes: float = Field(ge=0)
    fp8_weights: bool
    reduce_bytes: float = Field(ge=0)
    bucket_bytes: float = Field(ge=0)
    residual_bytes: float = Field(gt=0)
    loss_bytes: float = Field(gt=0)
    dropout: bool
    selective_recompute: float = Field(ge=0, le=1)
    splits_sequence: bool
    written_out: bool
    fused_kernels: bool
    fused_gate: bool
    fused_norms: bool
    fused_rotary: bool
    compiles_layers: bool
    nvidia_recipe: bool
    flash_kernel: FlashKernel
    overlaps_data: bool
    hook_shards: bool
    regathers_sequence: bool
    balances_stages: bool
    overlaps_tensor: bool
    gathers_per_layer: float = Field(ge=1)
    loss_traffic_bytes: float = Field(gt=0)
    fsdp2: int = Field(ge=0, le=3)
    own_ends: bool
    splits_logits: bool
    loss_turn_elements: float = Field(ge=0)
    fitted_as: str | None = None


@functools.cache
def frameworks() -> dict[str, Framework]:
    """Read all profiles, by name."""
    return {name: Framework.model_validate(entry) for name, entry in read_entries(FRAMEWORKS).items()}


def framework_name(name: str, *, cnn: bool = False) -> str:
    """Find a framework's profile; an unknown name is plain PyTorch (torchvision for a CNN)."""
    name = name.strip().lower()
    name = ALIASES.get(name, name)
    name = name if name in frameworks() else DEFAULT
    return CNN_DEFAULT if cnn and name in (DEFAULT, TRAINER) else name


def fp8_note(precision: Precision, framework: str, *, compiled: bool) -> str:
    """Note for recipes that are slower in 8 bits than in 16 (docs/estimator.md)."""
    if precision != "fp8" or compiled or frameworks()[framework].fused_kernels:
        return ""
    return (
        "fp8 in plain PyTorch costs more in casts than it saves unless it is compiled (H200: 1.5 to 2.4 times as slow "
        "as bf16); with --compile the figures are of compiled code"
    )


def slow_attention_note(model: ModelSpec, seq_len: int, framework: str) -> str:
    """Note on attention that PyTorch has no fused kernel for; empty where it has one, or other kernels are used."""
    if not frameworks()[framework].written_out:
        return ""
    if model.soft_cap or model.sinks:
        part = "soft caps" if model.soft_cap else "sinks"
        return f"attention with {part} is written out, without a fused kernel: its share of the step grows with seq_len"
    if model.windowed_layers and model.window < seq_len:
        return (
            f"a window of {model.window:,} tokens at seq_len {seq_len:,} is a mask in PyTorch: the scores outside are "
            "computed too"
        )
    return ""


def check_framework(name: str, model: ModelSpec) -> None:
    """Refuse training code that does not train this kind of model."""
    if model.architecture == "cnn":
        trains, kind, why = [CNN_DEFAULT, DEFAULT], "is a CNN", "the other profiles are of code for language models"
    elif model.encoder_layers:
        trains, kind = [TRAINER, DEFAULT], f"has an encoder ({model.architecture})"
        why = "its costs are counted from Hugging Face's modules"
    elif model.architecture == "module":
        trains, kind = [other for other, code in frameworks().items() if not code.master_bytes], "is a profiled module"
        why = "the other profiles keep weights beside the module's own"
    else:
        trains, kind = [other for other in frameworks() if other != CNN_DEFAULT], "is a transformer"
        why = "it trains CNNs"
    if name not in trains:
        raise InvalidInputError(
            f"framework is {name}, and {model.name} {kind}",
            limit=", ".join(trains),
            why=why,
            next_step="leave out --framework",
        )
