"""Hugging Face ``config.json`` as a ModelSpec: one table of field names, one entry a ``model_type``.

The names are those of the ``transformers`` configuration classes
(https://github.com/huggingface/transformers, src/transformers/models/<model_type>/configuration_<model_type>.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.errors import InvalidInputError
from optimizer.workload.model import Architecture, ModelArchitecture, ModelSpec, count_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How one ``model_type`` names its fields, and what it fixes without naming it.

    Attributes:
        names: our field to the configuration's.
        ffn_multiple: ffn_size / hidden_size where the configuration leaves it out; 0 where it must not.
        gated, tied: feed-forward with three matrices; tie_word_embeddings where the configuration is silent.
        learned_positions: max_position_embeddings counts rows of an embedding (plus ``position_offset``).
    """

    names: Mapping[str, str]
    architecture: ModelArchitecture = "decoder"
    ffn_multiple: int = 0
    gated: bool = False
    tied: bool = True
    learned_positions: bool = False
    position_offset: int = 0
    details: Architecture = field(default_factory=Architecture)


_USUAL = {
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
_GPT2 = {
    "layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_size": "n_inner",
    "attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
}
_MPT = {
    "layers": "n_layers",
    "hidden_size": "d_model",
    "attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_seq_len",
}
_OPT = {**_USUAL, "ffn_size": "ffn_dim"}
_BIASED = Architecture(attention_bias="all", mlp_bias=True, norm_bias=True)
_BERT = Architecture(
    attention_bias="all",
    mlp_bias=True,
    norm_bias=True,
    final_norm=False,
    token_types=2,
    embedding_norm=True,
    mlm_head=True,
)
_LLAMA = _Family(names=_USUAL, gated=True, tied=False)
_QWEN2 = _Family(names=_USUAL, gated=True, tied=False, details=Architecture(attention_bias="qkv"))

FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _Family(names=_USUAL, gated=True, tied=False, details=Architecture(head_norms=True)),
    "gpt2": _Family(names=_GPT2, ffn_multiple=4, learned_positions=True, details=_BIASED),
    "gpt_neox": _Family(names=_USUAL, tied=False, details=_BIASED),
    "mpt": _Family(names=_MPT, ffn_multiple=4),
    "opt": _Family(names=_OPT, learned_positions=True, position_offset=2, details=_BIASED),
    "bert": _Family(names=_USUAL, architecture="encoder", learned_positions=True, details=_BERT),
    "roberta": _Family(
        names=_USUAL,
        architecture="encoder",
        learned_positions=True,
        details=Architecture(
            attention_bias="all",
            mlp_bias=True,
            norm_bias=True,
            final_norm=False,
            token_types=1,
            embedding_norm=True,
            mlm_head=True,
        ),
    ),
}

_REQUIRED = ("layers", "hidden_size", "attention_heads", "vocab_size")


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        InvalidInputError: the file cannot be read, or holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", next_step=_NEXT) from error
    except ValueError as error:  # also a number of thousands of digits
        raise InvalidInputError(f"{path} is not JSON: {error}", next_step=_NEXT) from error


_NEXT = "give the config.json of a Hugging Face model, a preset, or architecture fields"


def model_from_config(data: Any, *, name: str, origin: str) -> ModelSpec:
    """A configuration that was read from ``origin``, as a ModelSpec.

    Raises:
        InvalidInputError: it is not a model's; the message names what is missing.
    """
    if not isinstance(data, dict) or "model_type" not in data:
        kind = "an object without model_type" if isinstance(data, dict) else f"a JSON {type(data).__name__}"
        raise InvalidInputError(
            f"{origin} is not the config.json of a model: it holds {kind}",
            limit=f"model_type is one of {', '.join(FAMILIES)}",
            next_step=_NEXT,
        )
    family = FAMILIES.get(str(data["model_type"]))
    if family is None:
        raise InvalidInputError(
            f"{origin}: model_type is {data['model_type']!r}",
            limit=f"one of {', '.join(FAMILIES)}",
            why="each kind names its fields and places its biases in its own way",
            next_step="give the architecture's fields in a request (model: {layers: …, hidden_size: …})",
        )
    values = {ours: _whole(data, theirs, origin) for ours, theirs in family.names.items()}
    missing = [family.names[need] for need in _REQUIRED if not values[need]]
    if not values.get("ffn_size") and not family.ffn_multiple:
        missing.append(family.names["ffn_size"])
    if missing:
        raise InvalidInputError(
            f"{origin} lacks {', '.join(missing)}",
            limit=f"a {data['model_type']} configuration gives each as a whole number above 0",
            next_step=_NEXT,
        )
    hidden, heads = values["hidden_size"], values["attention_heads"]
    expansion = family.ffn_multiple
    if data["model_type"] == "mpt":
        expansion = _whole(data, "expansion_ratio", origin) or expansion
    experts = values.get("experts", 0)
    details = family.details
    if data["model_type"] == "llama" and data.get("attention_bias"):
        details = Architecture(attention_bias="all")
    shape: dict[str, Any] = {
        "layers": values["layers"],
        "hidden_size": hidden,
        "ffn_size": values.get("ffn_size") or expansion * hidden,
        "gated_mlp": family.gated,
        "attention_heads": heads,
        "kv_heads": values.get("kv_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "vocab_size": values["vocab_size"],
        "tied_embeddings": bool(data.get("tie_word_embeddings", family.tied)),
        "experts": experts,
        "experts_per_token": values.get("experts_per_token", 0) if experts else 0,
        "learned_positions": values["max_seq_len"] + family.position_offset if family.learned_positions else 0,
    }
    total, active = count_parameters(**shape, details=details)
    return ModelSpec(
        name=name,
        architecture=family.architecture,
        parameters=total,
        active_parameters=active,
        **shape,
        max_seq_len=values["max_seq_len"],
        source=f"{origin} ({data['model_type']})",
    )


def _whole(data: Mapping[str, Any], key: str, origin: str) -> int:
    """The whole number at ``key``, 0 where there is none."""
    value = data.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"{origin}: {key} is {value!r}", limit="a whole number of at least 0", next_step=_NEXT)
    return value
