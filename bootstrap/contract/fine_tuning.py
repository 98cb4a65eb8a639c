"""Fine-tuning: parameters that train and their adapters, with the bytes and counts that follow.

LoRA: arXiv:2106.09685. QLoRA, LoRA over a base in 4 bits: arXiv:2305.14314.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Method = Literal["full", "lora", "qlora"]
METHODS = get_args(Method)
# Methods without an estimate of their own, and what is possible: docs/models.md, "Preference training".
_PAIRS = (
    "plan it as full or lora over the tokens of both answers of each pair: the frozen reference's forward pass adds a "
    "third to the hours of full (half to lora's), its weights 2 bytes a parameter (none with lora, whose base it is)"
)
_SAMPLES = (
    "plan its updates as full or lora over the sampled tokens; the hours in which answers are generated and judged are "
    "not estimated"
)
OTHER_METHODS = {"dpo": _PAIRS, "ipo": _PAIRS, "kto": _PAIRS, "grpo": _SAMPLES, "ppo": _SAMPLES, "rloo": _SAMPLES}
# Projections with adapters: all of each layer (QLoRA, section 4: attention's alone do not reach full fine-tuning), or
# attention's.
Target = Literal["all", "attention"]
TARGETS = get_args(Target)
FROZEN = r"^(none|embedding|[1-9][0-9]{0,2})$"

# bf16 parameters, gradients and moments; bf16 alone is mixed precision, with 32-bit weights.
PURE = "pure-bf16"
# bitsandbytes' blockwise AdamW.
EIGHT_BIT = "adamw8bit"

# Decoders whose projections are separate torch.nn.Linear modules.
ADAPTED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuning:
    """Part of a model that trains: parameters of its own (method full), or adapters over a frozen base."""

    # Requests and plans have the texts and limits of the metadata, which pydantic reads.
    method: Method = field(
        default="full",
        metadata={"description": "lora and qlora train adapters over a frozen base, which qlora keeps in 4 bits."},
    )
    lora_rank: int = field(default=16, metadata={"ge": 1, "le": 1024, "description": "Rank of the adapters."})
    lora_alpha: int = field(
        default=32, metadata={"ge": 1, "le": 4096, "description": "Adapters' products are scaled by alpha / rank."}
    )
    lora_targets: Target = field(
        default="all", metadata={"description": "Projections with adapters: all of each layer, or attention's."}
    )
    frozen: str = field(
        default="none",
        metadata={"pattern": FROZEN, "description": "embedding, or a number of first layers (the embedding too)."},
    )

    @property
    def adapts(self) -> bool:
        """True where adapters train over a frozen base."""
        return self.method != "full"

    @property
    def four_bit(self) -> bool:
        """True where the base's projections are in 4 bits."""
        return self.method == "qlora"

    @property
    def trains_all(self) -> bool:
        """True where every parameter trains."""
        return self.method == "full" and self.frozen == "none"

    @property
    def frozen_layers(self) -> int:
        """First layers that do not train, of a full method."""
        return int(self.frozen) if self.frozen.isdigit() else 0

    @property
    def in_words(self) -> str:
        """The part that trains: "lora of rank 16 on all projections"; empty where all does."""
        if self.adapts:
            where = "all projections" if self.lora_targets == "all" else "attention's projections"
            return f"{self.method} of rank {self.lora_rank} on {where}"
        if self.frozen == "none":
            return ""
        layers = f" and the first {self.frozen} layers" if self.frozen_layers else ""
        return f"frozen embedding{layers}"


FULL_TRAINING = FineTuning()


def fine_tuning_problems(
    tuning: FineTuning, *, architecture: Mapping[str, Any], precision: str, sharding: str, tensor: int, context: int
) -> list[str]:
    """List the parts of a fine-tuning job that the trainer does not carry out."""
    if tuning.trains_all:
        return []
    if not re.match(FROZEN, tuning.frozen):
        return [f"frozen is {tuning.frozen!r}, and not none, embedding or a number of first layers"]
    if tuning.adapts and tuning.frozen != "none":
        return [f"frozen is {tuning.frozen}, and method {tuning.method} freezes the whole base"]
    kind = str(architecture.get("model_type", ""))
    if kind not in ADAPTED:
        return [f"{tuning.in_words}: the trainer freezes and adapts {', '.join(ADAPTED)}, not {kind or 'this model'}"]
    reasons = []
    layers = architecture.get("num_hidden_layers")
    if isinstance(layers, int) and tuning.frozen_layers >= layers:
        reasons.append(f"frozen is {tuning.frozen}, and the model has {layers} layers")
    for name, ranks in (("tensor", tensor), ("context", context)):
        if ranks > 1:
            reasons.append(f"{tuning.in_words} goes with data ranks only, and {name} parallelism is {ranks}")
    if tuning.four_bit and sharding != "ddp":
        reasons.append(
            f"method is qlora, and sharding {sharding}: FSDP2 splits parameters by rows, and bitsandbytes' 4-bit "
            "weights are packed, without rows, and keep their scales outside of the parameter"
        )
    if tuning.four_bit and precision not in ("bf16", PURE):
        reasons.append(f"method is qlora, whose products are bf16, and precision is {precision}")
    return reasons
