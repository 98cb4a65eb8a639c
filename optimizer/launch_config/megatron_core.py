"""Megatron-LM (megatron-core): a shell script that starts ``pretrain_gpt.py`` with the plan's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optimizer.contract.plan import FleetPlan
from optimizer.launch_config.engine import Engine, checkpoint_interval_steps, read_model
from optimizer.workload.huggingface import class_default
from optimizer.workload.model import ModelSpec

# Arguments by name, without their dashes: True is a switch, False and None leave the argument out.
Arguments = dict[str, Any]

# Megatron's FSDP shards what the strategy names; its distributed optimizer is zero1.
_FSDP_STRATEGIES = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
_PRECISIONS: dict[str, Arguments] = {
    "fp32": {},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
    "fp8": {"bf16": True, "fp8-format": "hybrid"},
}
_OPTIMIZERS: dict[str, Arguments] = {
    "adamw": {"optimizer": "adam"},
    "adam": {"optimizer": "adam --weight-decay 0"},
    "sgd": {"optimizer": "sgd"},
}
_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_MAY_HAVE_BIASES = ("llama", "qwen3", "qwen3_moe")


def _further(plan: FleetPlan) -> Iterator[str]:
    split, job = plan.parallelism, plan.job
    if job.compiled:
        yield "the run is compiled, and it has no torch.compile of the model"
    if split.sharding in _FSDP_STRATEGIES and split.pipeline > 1:
        yield f"pipeline parallelism is {split.pipeline} with {split.sharding}: its pipelines shard by zero1"
    architecture = job.architecture or {}
    kind = architecture.get("model_type")
    if architecture and kind not in _GATED:
        yield f"the model is of type {kind or job.model}, and pretrain_gpt.py's arguments are for {', '.join(_GATED)}"
        return
    if kind in _MAY_HAVE_BIASES and (architecture.get("attention_bias") or architecture.get("mlp_bias")):
        yield "the model has biases in some of its products, and --disable-bias-linear is for all"
    if (gate := architecture.get("hidden_act") or "silu") not in ("silu", "swish"):
        yield f"the model's activation is {gate}, and --swiglu has silu"
    if (scaling := _rope_type(architecture)) not in ("default", "llama3"):
        yield f"the model's rotary positions are scaled by {scaling}, and --use-rope-scaling is Llama 3's scaling"
    model = read_model(plan)
    if model is not None and (model.dense_layers or (model.windowed_layers and model.window < job.seq_len)):
        yield "its layers have windows, or some have no experts, and the arguments are for full and equal ones"
    if model is not None and _end_stages(plan, model) is None:
        yield (
            f"{model.layers} layers do not make {split.pipeline * split.virtual_stages} equal stages, "
            "nor with the embedding and the loss counted as layers"
        )


def _rope(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    return architecture.get("rope_parameters") or architecture.get("rope_scaling") or {}


def _rope_type(architecture: Mapping[str, Any]) -> str:
    """Scaling of rotary positions; older configs name it ``type``."""
    rope = _rope(architecture)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _end_stages(plan: FleetPlan, model: ModelSpec) -> Arguments | None:
    """Arguments by which the first and last stage have a layer less; None where stages differ in another way.

    Megatron wants the layers, and embedding and loss where they count as one, in equal stages (arguments.py,
    validate_args).
    """
    ends = ["account-for-loss-in-pipeline-split", "account-for-embedding-in-pipeline-split"]
    stages = plan.parallelism.pipeline * plan.parallelism.virtual_stages
    for count in range(len(ends) + 1):
        if (model.layers + count) % stages == 0:
            return dict.fromkeys(ends[:count], True)
    return None


def _layout(plan: FleetPlan) -> Arguments:
    split = plan.parallelism
    strategy = _FSDP_STRATEGIES.get(split.sharding)
    is_recomputed = split.activation_checkpointing == "full"
    return {
        "tensor-model-parallel-size": split.tensor,
        # Megatron refuses experts beside tensor parallelism without it.
        "sequence-parallel": split.sequence_parallel or (split.expert > 1 and split.tensor > 1),
        "pipeline-model-parallel-size": split.pipeline,
        "num-virtual-stages-per-pipeline-rank": split.virtual_stages > 1 and split.virtual_stages,
        "context-parallel-size": split.context,
        "expert-model-parallel-size": split.expert > 1 and split.expert,
        "use-distributed-optimizer": split.sharding == "zero1" or bool(strategy),
        "use-megatron-fsdp": bool(strategy),
        "data-parallel-sharding-strategy": strategy,
        "no-gradient-accumulation-fusion": bool(strategy),
        "recompute-granularity": split.activation_checkpointing != "none" and split.activation_checkpointing,
        "recompute-method": is_recomputed and "uniform",
        "recompute-num-layers": is_recomputed and "1",
    }


def _training(plan: FleetPlan) -> Arguments:
    split, job = plan.parallelism, plan.job
    return {
        "micro-batch-size": split.micro_batch,
        "global-batch-size": job.global_batch,
        "seq-length": job.seq_len,
        "train-iters": job.steps,
        **_PRECISIONS[job.precision],
        **_OPTIMIZERS[job.optimizer],
        "lr": "3e-4",
        "ckpt-format": "fsdp_dtensor" if split.sharding in _FSDP_STRATEGIES else "torch_dist",
        "save-interval": checkpoint_interval_steps(plan),
        # pretrain_gpt.py 0.16.1 divides by the interval, which has no default.
        "eval-interval": job.steps,
        "eval-iters": 0,
        # SIGTERM, which bootstrap/agent sends to code of the user's own, saves and ends the run.
        "exit-signal-handler": True,
    }


def _model(model: ModelSpec, architecture: Mapping[str, Any], seq_len: int) -> Arguments:
    kind, is_grouped = str(architecture["model_type"]), model.kv_heads != model.attention_heads
    rope, is_scaled = _rope(architecture), _rope_type(architecture) == "llama3"
    arguments: Arguments = {
        "num-layers": model.layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.dense_ffn_size or model.ffn_size,
        "num-attention-heads": model.attention_heads,
        "group-query-attention": is_grouped,
        "num-query-groups": is_grouped and model.kv_heads,
        "kv-channels": model.head_dim,
        "max-position-embeddings": max(seq_len, model.max_seq_len),
        "vocab-size": model.vocab_size,
        "position-embedding-type": "rope",
        "rotary-base": int(
            rope.get("rope_theta") or architecture.get("rope_theta") or class_default(kind, "default_theta")
        ),
        "use-rope-scaling": is_scaled,
        "rope-scaling-factor": is_scaled and rope["factor"],
        "normalization": "RMSNorm",
        "norm-epsilon": architecture.get("rms_norm_eps", class_default(kind, "rms_norm_eps")),
        "swiglu": True,
        "disable-bias-linear": True,
        "add-qkv-bias": kind == "qwen2",
        "qk-layernorm": model.head_norms,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "attention-dropout": "0",
        "hidden-dropout": "0",
    }
    if model.experts:
        arguments |= {
            "num-experts": model.experts,
            "moe-router-topk": model.experts_per_token,
            "moe-ffn-hidden-size": model.ffn_size,
            # The weights of a token's experts add up to less than 1: the softmax is over all experts.
            "moe-router-pre-softmax": kind == "qwen3_moe" and not architecture.get("norm_topk_prob"),
            "moe-grouped-gemm": True,
            "moe-token-dispatcher-type": "alltoall",
        }
    return arguments


def _lines(arguments: Arguments) -> Iterator[str]:
    for name, value in arguments.items():
        if value is True:
            yield f"--{name}"
        elif value is not None and value is not False:
            yield f"--{name} {value}"


def _write(plan: FleetPlan) -> str:
    architecture = plan.job.architecture
    sections = [_layout(plan), _training(plan)]
    model = read_model(plan)
    if architecture is not None and model is not None:
        sections += [_end_stages(plan, model) or {}, _model(model, architecture, plan.job.seq_len)]
    arguments = "".join(f"  {line}\n" for section in sections for line in _lines(section))
    return f"""set -euo pipefail
# Megatron's FSDP needs several queues; its tensor parallelism one, for the order of copies and kernels.
export CUDA_DEVICE_MAX_CONNECTIONS={32 if plan.parallelism.sharding in _FSDP_STRATEGIES else 1}
arguments=(
{arguments})
exec python pretrain_gpt.py "${{arguments[@]}}" "$@"
"""


def _notes(plan: FleetPlan) -> Iterator[str]:
    yield "arguments that follow the script's name are pretrain_gpt.py's too: the tokenizer, the data, --save, --load"
    if plan.job.architecture is None:
        yield "the plan has no model config: add --num-layers, --hidden-size, --num-attention-heads and the like"


def _arguments(_plan: FleetPlan, file: str) -> list[str]:
    return ["--no-python", "bash", file, "--save", "CHECKPOINTS", "--load", "CHECKPOINTS"]


ENGINE = Engine(
    name="megatron-core",
    version="0.16.1",
    suffix=".sh",
    takes={
        "precision": (tuple(_PRECISIONS), "it has no switch for TF32, its weights are 32-bit"),
        "optimizer": (tuple(_OPTIMIZERS), "pretrain_gpt.py has no other of these"),
    },
    further=_further,
    write=_write,
    arguments=_arguments,
    notes=_notes,
)
