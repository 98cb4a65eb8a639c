"""The reach of the reference trainer (``bootstrap.trainer``): models, layouts, precisions, optimizers it carries out.

``gpufleet recommend`` offers these by default. The plan, the Pulumi program and the trainer itself ask ``unsupported``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bootstrap.contract.fine_tuning import EIGHT_BIT, FULL_TRAINING, PURE, FineTuning, fine_tuning_problems
from bootstrap.contract.node_plan import NodePlan

SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
# Mesh dimensions; "data" is always there.
SPLITS = ("data", "tensor", "context")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", PURE)
OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor", EIGHT_BIT)
# Adafactor's factored moments need whole matrices; bitsandbytes' kernels take plain tensors, not FSDP2's DTensors.
UNSHARDED_OPTIMIZERS = ("adafactor", EIGHT_BIT)
CHECKPOINTINGS = ("none", "selective", "full")
# Processes that decode images for one rank, at most: a GPU trains at most some 3,000 images/s.
MAX_LOADER_WORKERS = 16
# Shares of the global batch: equal, or set by the speed of each rank in the first steps.
BALANCES = ("none", "measured")
# Shardings whose ranks exchange parameters or gradients in every micro-batch, so that all must run as many.
IN_STEP = ("zero2", "zero3")
# Profiles of training code (optimizer/performance/data/frameworks.toml) that are the trainer's own.
FRAMEWORKS = ("torch", "torchvision", "gpufleet")

# Key of an architecture that names a torchvision model; any other architecture is a Hugging Face config.
TORCHVISION = "torchvision"
Family = Literal["decoder", "encoder", "cnn", "image"]
DECODERS = ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mpt", "opt", "phi3", "qwen2", "qwen3")
MODELS: dict[Family, tuple[str, ...]] = {
    "decoder": DECODERS,
    "encoder": ("bert", "roberta"),
    "cnn": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "image": ("vit",),
}
CNNS = MODELS["cnn"]
HUGGING_FACE = tuple(kind for family, kinds in MODELS.items() if family != "cnn" for kind in kinds)
# transformers' class of a family's model with its head; the trainer has no seq2seq and speech.
AUTO: dict[str, str] = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
    "speech": "AutoModelForSpeechSeq2Seq",
}
# Names of an architecture's fields that are null: Pulumi's configuration has no null, and a field that is left out has
# the default of its class.
NULLS = "null_fields"
IMAGE_CHANNELS = 3
# Decoders whose projections are separate matrices: the trainer gives each tensor rank whole heads of them. Fused
# projections (phi3's qkv_proj, gpt2's c_attn, mpt's Wqkv, gpt_neox's query_key_value) mix queries, keys and values.
TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")
# Decoders with rotary positions and causal scaled_dot_product_attention, which torch's context parallelism replaces.
CONTEXT_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")


def loader_workers(cores: int, ranks: int) -> int:
    """Processes that decode images for one rank: its part of the node's cores, one left for the training process."""
    return max(1, min(MAX_LOADER_WORKERS, cores // ranks - 1))


def unsupported(
    plan: NodePlan, *, gpus_per_node: int, framework: str = FRAMEWORKS[0], balance: str = BALANCES[0]
) -> list[str]:
    """List the parts of a plan that the trainer does not carry out, each with value and limit; empty for none.

    Args:
        framework: profile of the training code that the plan's estimate is of.
        gpus_per_node: ranks of one node.
    """
    if model := _model_problem(plan.architecture):
        return [model]
    reasons = [
        f"{name} {value} is not one of {', '.join(known)}"
        for name, value, known in (
            ("framework", framework, FRAMEWORKS),
            ("precision", plan.precision, PRECISIONS),
            ("optimizer", plan.optimizer, OPTIMIZERS),
            ("sharding", plan.sharding, SHARDINGS),
            ("activation checkpointing", plan.activation_checkpointing, CHECKPOINTINGS),
            ("balance", balance, BALANCES),
        )
        if value not in known
    ]
    if balance == "measured" and plan.sharding in IN_STEP:
        reasons.append(
            f"balance is measured, and sharding {plan.sharding} exchanges states in every micro-batch, so all ranks "
            "run as many: take ddp or zero1"
        )
    if plan.sharding != "ddp" and plan.optimizer in UNSHARDED_OPTIMIZERS:
        reasons.append(f"optimizer {plan.optimizer} has no sharded form, and sharding is {plan.sharding}")
    kind = model_kind(plan.architecture)
    if plan.precision == PURE and kind in CNNS:
        reasons.append(f"precision is {PURE}, and batch norms keep 32-bit statistics")
    tensor, context = plan.tensor_parallel, plan.context_parallel
    reasons += fine_tuning_problems(
        plan.tuning,
        architecture=plan.architecture,
        precision=plan.precision,
        sharding=plan.sharding,
        tensor=tensor,
        context=context,
    )
    for name, ranks in (("pipeline", plan.pipeline_parallel), ("expert", plan.expert_parallel)):
        if ranks > 1:
            reasons.append(f"{name} parallelism is {ranks}, and the trainer has none")
    if tensor > 1:
        reasons += _tensor_problems(plan, gpus_per_node)
    if context > 1 and "context" not in splits(plan.architecture, plan.seq_len, plan.optimizer):
        reasons.append(
            f"context parallelism is {context}: {kind} over {plan.seq_len} tokens has no full causal attention that "
            f"the trainer splits (it does {', '.join(CONTEXT_PARALLEL)})"
        )
    heads = plan.architecture.get("num_attention_heads")
    if context > 1 and isinstance(heads, int) and heads % (tensor * context):
        reasons.append(f"context parallelism is {context}, which does not divide a tensor rank's part of {heads} heads")
    return reasons


def shardings(optimizer: str, tuning: FineTuning = FULL_TRAINING) -> tuple[str, ...]:
    """Shardings that go with an optimizer and a method."""
    return SHARDINGS[:1] if optimizer in UNSHARDED_OPTIMIZERS or tuning.four_bit else SHARDINGS


def splits(
    architecture: Mapping[str, Any] | None, seq_len: int, optimizer: str, tuning: FineTuning = FULL_TRAINING
) -> tuple[str, ...]:
    """Mesh dimensions that the trainer can have above 1 for a model and its sequence length."""
    kind, whole = model_kind(architecture), tuning.trains_all
    tensor = kind in TENSOR_PARALLEL and optimizer not in UNSHARDED_OPTIMIZERS and whole
    context = kind in CONTEXT_PARALLEL and architecture is not None and _attends_fully(architecture, seq_len) and whole
    allowed = {"data": True, "tensor": tensor, "context": context}
    return tuple(name for name in SPLITS if allowed[name])


def model_kind(architecture: Mapping[str, Any] | None) -> str:
    """Hugging Face's model_type, or the name of a torchvision model; empty for none."""
    if architecture is None:
        return ""
    return str(architecture.get(TORCHVISION) or architecture.get("model_type") or "")


def with_nulls(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an architecture with its nulls in their places, as transformers takes it."""
    fields = {name: with_nulls(value) if isinstance(value, dict) else value for name, value in architecture.items()}
    return fields | dict.fromkeys(fields.pop(NULLS, ()))


def class_fields(architecture: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Copy an architecture as its class of transformers takes it: with nulls, and whole numbers as floats.

    Pulumi writes 50.0 as 50 (https://github.com/pulumi/pulumi/pull/7005), which strict classes refuse.
    """
    parts = getattr(settings, "sub_configs", {})
    types = {name: str(field.type) for name, field in getattr(settings, "__dataclass_fields__", {}).items()}
    return {
        name: class_fields(value, parts[name])
        if name in parts and isinstance(value, dict)
        else float(value)
        if type(value) is int and "float" in types.get(name, "")
        else value
        for name, value in with_nulls(architecture).items()
    }


def family_of(architecture: Mapping[str, Any]) -> Family:
    """Kind of samples and loss that a model trains with."""
    kind = model_kind(architecture)
    return next((family for family, kinds in MODELS.items() if kind in kinds), "decoder")


def is_mixture(architecture: Mapping[str, Any]) -> bool:
    """True for the config of a mixture of experts, also of one with a tower for images."""
    fields = {**architecture, **(architecture.get("text_config") or {})}
    return any(fields.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _model_problem(architecture: Mapping[str, Any]) -> str:
    if not architecture:
        return "the trainer builds a model from a config.json, architecture fields or a preset, and the plan has none"
    kind = model_kind(architecture)
    if TORCHVISION in architecture:
        return "" if kind in CNNS else f"model {kind} is not one of {', '.join(CNNS)}"
    if kind not in HUGGING_FACE:
        if is_mixture(architecture):
            return f"{kind} is a mixture of experts, which the trainer does not train"
        return f"model_type {kind} is not one of {', '.join(HUGGING_FACE)}"
    return ""


def _tensor_problems(plan: NodePlan, gpus_per_node: int) -> list[str]:
    architecture, tensor, kind = plan.architecture, plan.tensor_parallel, model_kind(plan.architecture)
    if kind not in TENSOR_PARALLEL:
        return [f"tensor parallelism is {tensor}, and the trainer does {', '.join(TENSOR_PARALLEL)}, not {kind}"]
    reasons = []
    if plan.optimizer in UNSHARDED_OPTIMIZERS:
        reasons.append(f"optimizer {plan.optimizer} has no sharded form, and tensor parallelism is {tensor}")
    if gpus_per_node % tensor:
        reasons.append(f"tensor parallelism is {tensor}, and a node's {gpus_per_node} GPUs are no multiple")
    heads = architecture.get("num_attention_heads")
    counts = {
        "attention heads": heads,
        "key-value heads": architecture.get("num_key_value_heads") or heads,
        "feed-forward width": architecture.get("intermediate_size"),
    }
    for name, count in counts.items():
        if not isinstance(count, int) or count % tensor:
            reasons.append(f"tensor parallelism is {tensor}, which does not divide the {name}, {count}")
    return reasons


def _attends_fully(architecture: Mapping[str, Any], seq_len: int) -> bool:
    """True where every token attends to all before it; qwen's window is off unless use_sliding_window."""
    if "sliding_attention" in (architecture.get("layer_types") or ()):
        return False
    window = architecture.get("sliding_window")
    uses_window = architecture.get("use_sliding_window", not model_kind(architecture).startswith("qwen"))
    return not (window and uses_window and window < seq_len)
