"""Architectures: the configuration from which a model is built, a Hugging Face config or {"torchvision": NAME}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootstrap.contract.trainer import CNNS, TORCHVISION, WITH_LENGTHS
from optimizer.contract.errors import InvalidInputError
from optimizer.workload.model import ModelSpec

NEXT = "give the config.json of a Hugging Face model, a preset, or architecture fields"

# Names of ModelSpec's fields in a Hugging Face config, by model_type:
# https://github.com/huggingface/transformers, src/transformers/models/<model_type>/configuration_<model_type>.py
USUAL = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
GPT2 = {
    "layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_size": "n_inner",
    "attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
}
QWEN_MIXTURE = USUAL | {
    "experts": "num_experts",
    "ffn_size": "moe_intermediate_size",
    "dense_ffn_size": "intermediate_size",
}
# Every head has keys and values of its own, hidden_size / num_attention_heads wide.
MULTI_HEAD = {ours: theirs for ours, theirs in USUAL.items() if ours not in ("kv_heads", "head_dim")}
DEEPSEEK = MULTI_HEAD | {
    "experts": "n_routed_experts",
    "ffn_size": "moe_intermediate_size",
    "dense_ffn_size": "intermediate_size",
    "dense_layers": "first_k_dense_replace",
}
_NAMES = {"gpt2": GPT2, "qwen3_moe": QWEN_MIXTURE, "deepseek_v3": DEEPSEEK}

# Objects and lists of a config that change the model; others are labels, generation settings and quantisation.
_NESTED = ("rope_scaling", "rope_parameters", "layer_types", "attn_config", "mlp_only_layers")
# Private scalars that change the model (OPT); others are transformers' own notes.
_PRIVATE = ("_remove_final_layer_norm",)
# Scalars that say who wrote the config, not what the model is.
_ABOUT = ("transformers_version", "torch_dtype", "dtype")


def build_architecture(model: ModelSpec) -> dict[str, Any] | None:
    """Build the architecture of a model; None where nothing says more of it than its size or its own function."""
    if model.architecture == "cnn":
        return {TORCHVISION: model.name} if model.name in CNNS else None
    config = model.config
    if config is None:
        return None
    if config["model_type"] in WITH_LENGTHS:
        return dict(config)
    names = _NAMES.get(config["model_type"], USUAL)
    shape = {theirs: getattr(model, ours) for ours, theirs in names.items() if _says_something(model, ours)}
    return {**shape, "tie_word_embeddings": model.tied_embeddings, **config}


def _says_something(model: ModelSpec, field: str) -> bool:
    default = {"kv_heads": model.attention_heads, "head_dim": model.hidden_size // model.attention_heads}.get(field, 0)
    return getattr(model, field) not in (0, default)


def prune_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what builds the model: plan, stack file and the nodes' 16 KiB of user data hold it.

    A null is left out, as Pulumi's configuration has none. Two nulls differ from the field's default: Mistral's
    sliding_window becomes the whole sequence, DeepSeek's q_lora_rank 0.
    """
    kept = {
        name: value
        for name, value in config.items()
        if value is not None
        and (name in _PRIVATE or not name.startswith("_"))
        and name not in _ABOUT
        and (name in _NESTED or not isinstance(value, dict | list))
    }
    if config.get("sliding_window", 0) is None and "max_position_embeddings" in kept:
        kept["sliding_window"] = kept["max_position_embeddings"]
    if config.get("q_lora_rank", 0) is None:
        kept["q_lora_rank"] = 0
    if set(kept.get("layer_types", ())) == {"full_attention"}:
        del kept["layer_types"]
    return kept


def whole(data: Mapping[str, Any], key: str, origin: str, *, least: int = 0) -> int:
    """Read a whole number of at least ``least``; 0 where it is absent, InvalidInputError where it is something else."""
    value = data.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(
            f"{origin}: {key} is {value!r}", limit=f"a whole number of at least {least}", next_step=NEXT
        )
    return value
