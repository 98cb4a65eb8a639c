"""Read a Hugging Face ``config.json`` as a ModelSpec: one table of field names, one entry a ``model_type``.

The names are those of the ``transformers`` configuration classes
(https://github.com/huggingface/transformers, src/transformers/models/<model_type>/configuration_<model_type>.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bootstrap.contract.trainer import WITH_LENGTHS
from optimizer.contract.errors import InvalidInputError, unreadable
from optimizer.workload.architecture import DEEPSEEK, GPT2, MULTI_HEAD, NEXT, QWEN_MIXTURE, USUAL, prune_config, whole
from optimizer.workload.encoders import model_from_encoder_config
from optimizer.workload.model import (
    PLAIN,
    BiasesAndNorms,
    LatentAttention,
    ModelArchitecture,
    ModelSpec,
    build_model,
    check_shape,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Field names of one ``model_type`` by ModelSpec's, and the facts it fixes without naming them.

    ``ffn_multiple`` is ffn_size / hidden_size where the configuration may leave ffn_size out, else 0; ``tied`` is
    tie_word_embeddings where it is silent; with ``learned_positions``, max_position_embeddings counts rows of an
    embedding (plus ``position_offset``). Every layer has sliding-window attention where ``window_pattern`` is 1, all
    but each ``window_pattern``-th otherwise. ``defaults`` are transformers' own of fields that a configuration
    may leave out; a family with attention_bias, mlp_bias or type_vocab_size among them has such biases or token types.
    """

    names: Mapping[str, str]
    architecture: ModelArchitecture = "decoder"
    ffn_multiple: int = 0
    window_pattern: int = 0
    head_norms: bool = False
    norms_per_layer: int = 2
    soft_caps: bool = False
    sinks: bool = False
    gated: bool = False
    tied: bool = True
    learned_positions: bool = False
    position_offset: int = 0
    details: BiasesAndNorms = PLAIN
    defaults: Mapping[str, int] = field(default_factory=dict)


_MPT = {
    "layers": "n_layers",
    "hidden_size": "d_model",
    "attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_seq_len",
}
_OPT = {**MULTI_HEAD, "ffn_size": "ffn_dim"}
_BIASED = BiasesAndNorms(attention_bias="all", mlp_bias=True, norm_bias=True)
_BERT = _Family(
    names=MULTI_HEAD,
    architecture="encoder",
    learned_positions=True,
    details=replace(_BIASED, final_norm=False, embedding_norm=True, mlm_head=True),
    defaults={"max_position_embeddings": 512, "type_vocab_size": 2},
)
_LLAMA = _Family(names=USUAL, gated=True, tied=False, defaults={"attention_bias": False, "mlp_bias": False})
_MISTRAL = replace(_LLAMA, window_pattern=1, defaults={"num_key_value_heads": 8, "sliding_window": 4096})
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "attention_bias": False}
_GEMMA2 = _Family(names=USUAL, gated=True, window_pattern=2, norms_per_layer=4, soft_caps=True, defaults=_GEMMA)

FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": replace(_MISTRAL, defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "phi3": replace(_LLAMA, window_pattern=1, defaults={}),
    "qwen2": replace(
        _LLAMA, details=BiasesAndNorms(attention_bias="qkv"), defaults=_QWEN | {"num_key_value_heads": 32}
    ),
    "qwen3": replace(
        _LLAMA,
        head_norms=True,
        defaults=_QWEN | {"head_dim": 128, "num_key_value_heads": 32, "attention_bias": False},
    ),
    # Qwen 3's mixture has no lower layers that attend fully (modeling_qwen3_moe.py).
    "qwen3_moe": replace(
        _LLAMA,
        names=QWEN_MIXTURE,
        head_norms=True,
        window_pattern=1,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "attention_bias": False,
        },
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, window_pattern=6, head_norms=True, soft_caps=False),
    "deepseek_v3": replace(
        _LLAMA,
        names=DEEPSEEK,
        defaults={
            "intermediate_size": 18432,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "attention_bias": False,
        },
    ),
    "gpt_oss": replace(
        _LLAMA,
        window_pattern=2,
        sinks=True,
        details=BiasesAndNorms(attention_bias="all", mlp_bias=True),
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
    ),
    "gpt2": _Family(
        names=GPT2, ffn_multiple=4, learned_positions=True, details=_BIASED, defaults={"n_positions": 1024}
    ),
    "gpt_neox": _Family(names=MULTI_HEAD, tied=False, details=_BIASED, defaults={"attention_bias": True}),
    "mpt": _Family(names=_MPT, ffn_multiple=4),
    "opt": _Family(
        names=_OPT,
        learned_positions=True,
        position_offset=2,
        details=_BIASED,
        defaults={
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "bert": _BERT,
    "roberta": _BERT,
}

_KINDS = (*FAMILIES, *WITH_LENGTHS)
_REQUIRED = ("layers", "hidden_size", "attention_heads", "vocab_size")
# Fields whose 0 is no default in transformers, which builds another model of it, or none.
_ABOVE_0 = ("kv_heads", "head_dim", "ffn_size", "dense_ffn_size")
# transformers takes each for the field that a family names its experts by (attribute_map).
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MAY_BE_NULL = ("sliding_window", "max_window_layers")


def read_json(path: Path) -> Any:
    """Parse a JSON file; InvalidInputError where it cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(unreadable(path, error), next_step=NEXT) from error
    except ValueError as error:  # also a number of thousands of digits
        raise InvalidInputError(f"{path} is not JSON: {error}", next_step=NEXT) from error


def model_from_config(data: Any, *, name: str, origin: str) -> ModelSpec:
    """Build the ModelSpec of a configuration; InvalidInputError where it is unknown or lacks a field."""
    if not isinstance(data, dict) or "model_type" not in data:
        kind = "an object without model_type" if isinstance(data, dict) else f"a JSON {type(data).__name__}"
        raise InvalidInputError(
            f"{origin} is not the config.json of a model: it holds {kind}",
            limit=f"model_type is one of {', '.join(_KINDS)}",
            next_step=NEXT,
        )
    if data["model_type"] in WITH_LENGTHS:
        return model_from_encoder_config(data, name=name, origin=origin)
    family = FAMILIES.get(str(data["model_type"]))
    if family is None:
        raise InvalidInputError(
            f"{origin}: model_type is {data['model_type']!r}",
            limit=f"one of {', '.join(_KINDS)}",
            why="every kind has its own field names and biases",
            next_step="give the architecture's fields in a request (model: {layers: …, hidden_size: …})",
        )
    if data.get("add_cross_attention"):
        raise InvalidInputError(
            f"{origin}: add_cross_attention is {data['add_cross_attention']}",
            limit="a model of its own: false, or left out",
            why="it is the decoder beside an encoder that the configuration does not describe",
            next_step="plan the pair by gpufleet profile, or give the fields of a request (model: {layers: …})",
        )
    _refuse_other_defaults(data, family, origin)
    config, data = prune_config(data), {**family.defaults, **data}
    values = {ours: whole(data, theirs, origin, least=int(ours in _ABOVE_0)) for ours, theirs in family.names.items()}
    missing = [family.names[need] for need in _REQUIRED if not values[need]]
    if not values.get("ffn_size") and not family.ffn_multiple:
        missing.append(family.names["ffn_size"])
    if missing:
        raise InvalidInputError(
            f"{origin} lacks {', '.join(missing)}",
            limit=f"a {data['model_type']} configuration gives each as a whole number above 0",
            next_step=NEXT,
        )
    values["ffn_size"] = values.get("ffn_size") or family.ffn_multiple * values["hidden_size"]
    if not values.get("experts"):
        values["experts_per_token"] = 0
    window, windowed_layers = _window(data, family, values["layers"], origin)
    return check_shape(
        build_model(
            _details(data, family, origin),
            name=name,
            architecture=family.architecture,
            **(values | _mixture(data, values, origin)),
            latent_attention=_latent_attention(data, origin) if data["model_type"] == "deepseek_v3" else None,
            window=window,
            windowed_layers=windowed_layers,
            soft_cap=bool(family.soft_caps and data.get("attn_logit_softcapping", 50.0)),
            sinks=family.sinks,
            logits_soft_cap=bool(family.soft_caps and data.get("final_logit_softcapping", 30.0)),
            norms_per_layer=family.norms_per_layer,
            head_norms=family.head_norms,
            gated_mlp=family.gated,
            tied_embeddings=bool(data.get("tie_word_embeddings", family.tied)),
            learned_positions=values["max_seq_len"] + family.position_offset if family.learned_positions else 0,
            embedding_width=_embedding_width(data, values["hidden_size"], origin),
            config=config,
            source=f"{origin} ({data['model_type']})",
        )
    )


def _refuse_other_defaults(data: Mapping[str, Any], family: _Family, origin: str) -> None:
    """Refuse fields that transformers, or a plan, which has no null, reads otherwise than they are counted."""
    own = family.names.get("experts")
    for name, default in family.defaults.items():
        value = data.get(name, default)
        if default and name not in _MAY_BE_NULL and (value is None or (name == own and value == 0)):
            raise InvalidInputError(
                f"{origin}: {name} is {value}",
                limit=f"a value above 0, or left out for transformers' default, {default}",
                next_step=NEXT,
            )
    others = [name for name in _EXPERTS if name in data and own and data[name] != data.get(own)]
    if own in family.defaults and others:
        raise InvalidInputError(
            f"{origin}: {others[0]} is {data[others[0]]}",
            limit=f"{own}, the name of a {data['model_type']} configuration's experts",
            next_step=NEXT,
        )


def _details(data: Mapping[str, Any], family: _Family, origin: str) -> BiasesAndNorms:
    """Biases and token types, where the family's configurations give them."""
    given: dict[str, Any] = {}
    if "attention_bias" in family.defaults:
        given["attention_bias"] = "all" if data["attention_bias"] else "none"
    if "mlp_bias" in family.defaults:
        given["mlp_bias"] = bool(data["mlp_bias"])
    if "type_vocab_size" in family.defaults:
        given["token_types"] = whole(data, "type_vocab_size", origin)
    if data["model_type"] == "opt":  # OPT-350m has norms behind its sublayers, and none at the end
        given["final_norm"] = bool(data["do_layer_norm_before"]) and not data["_remove_final_layer_norm"]
        given["attention_bias"] = "all" if data["enable_bias"] else "none"
        given["mlp_bias"] = bool(data["enable_bias"])
        given["norm_weight"] = given["norm_bias"] = bool(data["layer_norm_elementwise_affine"])
    return replace(family.details, **given)


def _embedding_width(data: Mapping[str, Any], hidden_size: int, origin: str) -> int:
    width = whole(data, "word_embed_proj_dim", origin) if data["model_type"] == "opt" else 0
    return 0 if width == hidden_size else width


def _window(data: Mapping[str, Any], family: _Family, layers: int, origin: str) -> tuple[int, int]:
    """Tokens that sliding-window attention sees, and the layers that have it."""
    window = whole(data, "sliding_window", origin)
    if str(data["model_type"]).startswith("qwen") and not data.get("use_sliding_window"):
        window = 0
    types = data.get("layer_types")
    if not window or not (types or family.window_pattern or data.get("use_sliding_window")):
        return 0, 0
    if isinstance(types, list):
        return window, types.count("sliding_attention")
    if not family.window_pattern:  # Qwen's lower layers attend fully (configuration_qwen2.py)
        return window, max(0, layers - whole(data, "max_window_layers", origin))
    pattern = whole(data, "sliding_window_pattern", origin, least=1) or family.window_pattern
    return window, layers if pattern == 1 else layers - layers // pattern


def _mixture(data: Mapping[str, Any], values: Mapping[str, int], origin: str) -> dict[str, int]:
    """Fields of a mixture whose layers or experts are not all alike."""
    if data["model_type"] == "deepseek_v3":
        return {
            "shared_ffn_size": whole(data, "n_shared_experts", origin) * values["ffn_size"],
            "dense_layers": min(values["dense_layers"], values["layers"]),
        }
    if data["model_type"] == "qwen3_moe":
        dense, step = data.get("mlp_only_layers") or [], whole(data, "decoder_sparse_step", origin, least=1) or 1
        return {"dense_layers": sum(i in dense or (i + 1) % step != 0 for i in range(values["layers"]))}
    return {}


def _latent_attention(data: Mapping[str, Any], origin: str) -> LatentAttention:
    names = {
        "query_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "rope_dim": "qk_rope_head_dim",
        "nope_dim": "qk_nope_head_dim",
        "value_dim": "v_head_dim",
    }
    ranks = {ours: whole(data, theirs, origin) for ours, theirs in names.items()}
    # Configurations whose queries have no latents say so with a null; a field that is not there has a default.
    without = "query_rank" if names["query_rank"] in data else None
    missing = [names[ours] for ours, value in ranks.items() if not value and ours != without]
    if missing:
        raise InvalidInputError(
            f"{origin} lacks {', '.join(missing)}",
            limit="whole numbers above 0: latent attention is counted with latents of queries, keys and values",
            next_step=NEXT,
        )
    return LatentAttention(**ranks)
