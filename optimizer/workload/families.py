"""Families of Hugging Face models: how the fields of each ``model_type`` map to ModelSpec's, one row a family.

Names are those of transformers' configuration classes, parameters those of modeling_<model_type>.py beside them
(https://github.com/huggingface/transformers, src/transformers/models/<model_type>, 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bootstrap.contract.trainer import IMAGE_CHANNELS
from optimizer.contract.errors import InvalidInputError
from optimizer.workload.model import LatentAttention

NEXT = "compare it with the published config.json of a Hugging Face model, or name a preset"
Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Fields of a configuration over its class's defaults; reading checks them.

    Attributes:
        given: what the configuration itself says, under the class's own names.
        defaults: every field of the class; a null there means that the class finds the value itself.
        spelling: names that the user wrote, by the class's own.
    """

    kind: str
    origin: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    spelling: Mapping[str, str]

    def get(self, name: str) -> Any:
        """Return the given value, also a null, or the class's default."""
        return self.given.get(name, self.defaults.get(name))

    def whole(self, name: str, *, least: int = 0, optional: bool = False) -> int:
        """Read a whole number; 0 for a null, which needs ``optional`` where the class's default is another."""
        value, default = self.get(name), self.defaults.get(name)
        if value is None and (optional or default is None):
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            left_out = "" if default is None else f", or left out for transformers' default, {default}"
            raise self.wrong(
                f"{self.spelling.get(name, name)} is {value!r}", f"a whole number of at least {least}{left_out}"
            )
        return value

    def wrong(self, got: str, limit: str, why: str = "", next_step: str = NEXT) -> InvalidInputError:
        """Error of a value that the configuration has."""
        return InvalidInputError(f"{self.origin}: {got}", limit=limit, why=why, next_step=next_step)

    def flag(self, name: str) -> bool:
        """Read a switch; a null that the class takes is off."""
        return bool(self.get(name))

    def check_heads(self, heads: str, width: str) -> None:
        """Refuse a number of heads that does not divide the width."""
        if self.whole(width) % self.whole(heads, least=1):
            raise self.wrong(f"{heads} is {self.get(heads)}", f"a divisor of {width}, {self.get(width)}")


Part = Callable[[Config, Values], Values]

# Names of the canonical architecture's fields in a configuration.
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
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
SWITCHES = ("attention_bias", "mlp_bias", "head_norms", "norm_weight", "norm_bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One ``model_type``.

    Attributes:
        names: configuration's names of ModelSpec's fields, where they differ from USUAL and from the class's aliases of
            it; a name that the class does not have is not read.
        facts: fields of ModelSpec that the family fixes; ``attention_bias`` is the kind of bias
            where the switch is on.
        parts: functions that read what names do not say.
        window_pattern: every layer has sliding-window attention where it is 1, all but each n-th where it is n.
        ffn_multiple: ffn_size / hidden_size where the configuration may leave ffn_size out.
        fixed: fields whose other values build a model that is not counted.
        text, vision: model_type of the nested configurations of a model with a tower for images.
        ties: configurations whose tie_word_embeddings ties, where there are two; either one by default.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    window_pattern: int = 0
    ffn_multiple: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    vision: str = ""
    ties: tuple[Literal["whole", "text"], ...] = ("whole", "text")

    @property
    def architecture(self) -> str:
        """ModelSpec.architecture."""
        return str(self.facts.get("architecture", "decoder"))


def explicit_sizes(names: Mapping[str, str], values: Mapping[str, Any]) -> Values:
    """Sizes by their names in a configuration, without those that every class finds from the rest."""
    own = {"kv_heads": values["attention_heads"], "head_dim": values["hidden_size"] // values["attention_heads"]}
    return {
        theirs: values[ours]
        for ours, theirs in names.items()
        if ours not in SWITCHES and values.get(ours) not in (0, None, own.get(ours, 0))
    }


def windows(c: Config, layers: int, pattern: int) -> Values:
    """Tokens that sliding-window attention sees, and the layers that have it."""
    window = c.whole("sliding_window", optional=True)
    is_asked = bool(c.get("use_sliding_window"))
    if "use_sliding_window" in c.defaults and not is_asked:
        window = 0
    types = c.get("layer_types")
    if not window or not (types or pattern or is_asked):
        return {}
    if isinstance(types, list):
        return {"window": window, "windowed_layers": types.count("sliding_attention")}
    if not pattern:  # Qwen's lower layers attend fully (configuration_qwen2.py)
        return {"window": window, "windowed_layers": max(0, layers - c.whole("max_window_layers", optional=True))}
    pattern = c.whole("sliding_window_pattern", least=1) or pattern
    return {"window": window, "windowed_layers": layers if pattern == 1 else layers - layers // pattern}


def _first_layers_dense(c: Config, v: Values) -> Values:
    """Mixtures with shared experts, whose first layers have none (DeepSeek, GLM)."""
    dense = min(c.whole("first_k_dense_replace"), v["layers"])
    return {"shared_ffn_size": c.whole("n_shared_experts") * v["ffn_size"], "dense_layers": dense}


def _sparse_steps(c: Config, v: Values) -> Values:
    dense, step = c.get("mlp_only_layers") or [], c.whole("decoder_sparse_step", least=1)
    return {"dense_layers": sum(i in dense or (i + 1) % step != 0 for i in range(v["layers"]))}


def _shared_expert(c: Config, v: Values) -> Values:
    layers = v["layers"] - _sparse_steps(c, v)["dense_layers"]
    return {"shared_ffn_size": c.whole("shared_expert_intermediate_size"), "beside": layers * v["hidden_size"]}


def _latents(c: Config, _: Values) -> Values:
    names = {
        "query_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim",
        "nope_dim": "qk_nope_head_dim", "value_dim": "v_head_dim",
    }  # fmt: skip
    ranks = {ours: c.whole(theirs, least=1, optional=ours == "query_rank") for ours, theirs in names.items()}
    missing = [names[ours] for ours, value in ranks.items() if not value and ours != "query_rank"]
    if missing or any(name not in c.given for name in names.values()):
        raise InvalidInputError(
            f"{c.origin} lacks {', '.join(missing or [name for name in names.values() if name not in c.given])}",
            limit="whole numbers above 0: latent attention is counted with latents of queries, keys and values",
            next_step=NEXT,
        )
    return {"latent_attention": LatentAttention(**ranks)}


def _llama4(c: Config, v: Values) -> Values:
    """Every n-th layer has experts; all but each n-th attend to their own chunk of tokens."""
    layers, step = v["layers"], c.whole("interleave_moe_layer_step", least=1)
    sparse, local = c.get("moe_layers"), c.get("no_rope_layers")
    chunk, types = c.whole("attention_chunk_size", optional=True), c.get("layer_types")
    if isinstance(types, list):
        chunked = types.count("chunked_attention")
    else:
        interval = c.defaults["no_rope_layer_interval"]
        chunked = sum(map(bool, local)) if local else layers - layers // (c.get("no_rope_layer_interval") or interval)
    return {
        "dense_layers": layers - (len(sparse) if sparse is not None else layers // step),
        "shared_ffn_size": v["ffn_size"],
        "window": chunk,
        "windowed_layers": chunked if chunk else 0,
    }


def _falcon(c: Config, v: Values) -> Values:
    is_new, norms = c.flag("new_decoder_architecture"), c.whole("num_ln_in_parallel_attn")
    kv_heads = (c.whole("num_kv_heads") or v["attention_heads"]) if is_new else v["attention_heads"]
    if not is_new and c.flag("multi_query"):
        kv_heads = 1
    has_two = not c.flag("parallel_attn") or (norms or 2 * is_new) == 2
    return {"kv_heads": kv_heads, "norms_per_layer": 2 if has_two else 1}


def _opt(c: Config, v: Values) -> Values:
    """OPT-350m has norms behind its sublayers, none at the end, and a narrow embedding."""
    width = c.whole("word_embed_proj_dim", least=1)
    return {
        "final_norm": c.flag("do_layer_norm_before") and not c.get("_remove_final_layer_norm"),
        "embedding_width": 0 if width == v["hidden_size"] else width,
    }


def _token_types(c: Config, _: Values) -> Values:
    return {"token_types": c.whole("type_vocab_size")}


def _deberta(c: Config, v: Values) -> Values:
    """Relative positions: projections of their own in each layer, and an embedding (arXiv:2006.03654, 3.1)."""
    hidden, is_first = v["hidden_size"], c.kind == "deberta"
    beside = -hidden * v["layers"] if is_first else 0  # its keys have no bias
    if c.flag("relative_attention"):
        kinds, shares = c.get("pos_att_type") or [], bool(c.get("share_att_key")) and not is_first
        of_keys = hidden * hidden + (0 if is_first else hidden)
        a_layer = of_keys * ("c2p" in kinds) + (hidden * hidden + hidden) * ("p2c" in kinds)
        reach = c.get("max_relative_positions")
        reach = v["max_seq_len"] if reach < 1 else reach
        buckets = 0 if is_first else c.whole("position_buckets", least=-1)
        beside += v["layers"] * (0 if shares else a_layer) + 2 * (buckets if buckets > 0 else reach) * hidden
    if "layer_norm" in str(c.get("norm_rel_ebd")):
        beside += 2 * hidden
    if kernel := c.whole("conv_kernel_size"):
        beside += kernel * hidden * hidden + 3 * hidden
    learned = v["max_seq_len"] if c.flag("position_biased_input") else 0
    return {"beside": beside, "learned_positions": learned}


def _modernbert(c: Config, v: Values) -> Values:
    """The head's norm is as wide as the one that the first layer lacks."""
    hidden, layers = v["hidden_size"], v["layers"]
    head = hidden * hidden + hidden * c.flag("classifier_bias") + v["vocab_size"] * c.flag("decoder_bias")
    types, every = c.get("layer_types"), c.whole("global_attn_every_n_layers", least=1) or 3
    windowed = types.count("sliding_attention") if isinstance(types, list) else layers - -(-layers // every)
    window = {"window": c.whole("local_attention"), "windowed_layers": windowed}
    return {"beside": head, **window}


def _one_vocabulary_bias(c: Config, v: Values) -> Values:
    """DistilBERT's head has one, also where its projection is not the embedding."""
    return {"beside": 0 if c.get("tie_word_embeddings") else -v["vocab_size"]}


def _lm_head_bias(_: Config, v: Values) -> Values:
    return {"beside": v["vocab_size"]}


def _learned(rows: int = 0) -> Part:
    return lambda _, v: {"learned_positions": v["max_seq_len"] + rows}


# --- towers for images ------------------------------------------------------------------------------------------------


def _encoder_layer(hidden: int, ffn: int) -> int:
    """Parameters of a layer of ViT's kind: attention, two matrices and two norms, all with biases."""
    return 4 * hidden**2 + 2 * hidden * ffn + ffn + 9 * hidden


def _vision_layers(c: Config) -> tuple[int, int, int, int]:
    """Width, inner width, parameters of all layers, and patches of an image."""
    c.check_heads("num_attention_heads", "hidden_size")
    hidden, ffn = c.whole("hidden_size", least=1), c.whole("intermediate_size", least=1)
    patches = (c.whole("image_size", least=1) // c.whole("patch_size", least=1)) ** 2
    return hidden, ffn, c.whole("num_hidden_layers", least=1) * _encoder_layer(hidden, ffn), patches


def _siglip(c: Config, text_width: int) -> int:
    hidden, ffn, layers, patches = _vision_layers(c)
    outside = c.whole("num_channels") * c.whole("patch_size") ** 2 * hidden + hidden + patches * hidden + 2 * hidden
    head = _encoder_layer(hidden, ffn) - hidden if c.flag("vision_use_head") else 0  # a probe, and one norm less
    return layers + outside + head + hidden * text_width + hidden


def _llama4_vision(c: Config, text_width: int) -> int:
    hidden, ffn, layers, patches = _vision_layers(c)
    outside = c.whole("num_channels") * c.whole("patch_size") ** 2 * hidden + (patches + 2) * hidden + 4 * hidden
    adapter = ffn * c.whole("projector_input_dim") + c.whole("projector_output_dim") ** 2
    return layers + outside + adapter + c.whole("vision_output_dim") * text_width


def _qwen_vision(c: Config, _: int) -> int:
    is_first = "embed_dim" in c.defaults  # Qwen 2; 2.5 has gated blocks and RMSNorm
    width = c.whole("embed_dim" if is_first else "hidden_size", least=1)
    if is_first:
        layer = _encoder_layer(width, int(width * c.get("mlp_ratio")))
    else:
        ffn = c.whole("intermediate_size", least=1)
        layer = 4 * width**2 + 3 * width * ffn + 2 * ffn + 7 * width
    merged, out = width * c.whole("spatial_merge_size") ** 2, "hidden_size" if is_first else "out_hidden_size"
    patch = c.whole("in_channels") * c.whole("temporal_patch_size") * c.whole("patch_size") ** 2 * width
    merger = (2 if is_first else 1) * width + merged**2 + merged + (merged + 1) * c.whole(out)
    return c.whole("depth", least=1) * layer + patch + merger


TOWERS: dict[str, Callable[[Config, int], int]] = {
    "siglip_vision_model": _siglip,
    "llama4_vision_model": _llama4_vision,
    "qwen2_vl_vision": _qwen_vision,
    "qwen2_5_vl_vision": _qwen_vision,
}

# --- encoders with lengths of their own -------------------------------------------------------------------------------


def _t5(c: Config, v: Values) -> Values:
    hidden, ffn, heads, encoder = v["hidden_size"], v["ffn_size"], v["attention_heads"], v["layers"]
    decoder, buckets = c.whole("num_decoder_layers", least=1), c.whole("relative_attention_num_buckets", least=1)
    decoder = decoder or encoder
    gated = bool(c.given.get("is_gated_act", str(c.get("feed_forward_proj")).startswith("gated")))
    attention, block = 4 * hidden * heads * v["head_dim"], (3 if gated else 2) * hidden * ffn
    layers = encoder * (attention + block + 2 * hidden) + decoder * (2 * attention + block + 3 * hidden)
    # Since version 5 transformers ties the output projection of T5 1.1 too, whose weights have one of their own
    # (configuration_t5.py, __post_init__).
    return {
        "parameters": layers + v["vocab_size"] * hidden + 2 * (buckets * heads + hidden),
        "layers": encoder + decoder,
        "encoder_layers": encoder,
        "gated_mlp": gated,
        "tied_embeddings": True,
    }


def _vit(c: Config, v: Values) -> Values:
    hidden, layers, ffn = v["hidden_size"], v["layers"], v["ffn_size"]
    image, patch, channels = (c.whole(name, least=1) for name in ("image_size", "patch_size", "num_channels"))
    if image % patch:
        raise c.wrong(f"image_size is {image} and patch_size {patch}", "patches that do not overlap")
    if channels != IMAGE_CHANNELS:
        raise c.wrong(f"num_channels is {channels}", f"{IMAGE_CHANNELS}: images are read as RGB")
    labels = c.whole("num_labels", least=1) or len(c.given.get("id2label") or {}) or 2
    patches, stem = (image // patch) ** 2, channels * patch**2 * hidden
    layer = _encoder_layer(hidden, ffn) - (0 if c.given.get("qkv_bias") in (None, True) else 3 * hidden)
    outside = stem + hidden + (patches + 2) * hidden + 2 * hidden + hidden * labels + labels
    return {
        "parameters": layers * layer + outside,
        "encoder_layers": layers,
        "encoder_tokens": patches + 1,
        "vocab_size": labels,
        "tied_embeddings": True,
        "learned_positions": patches + 1,
        "flops_per_sample": 2.0 * patches * stem,
        "activations_per_sample": float(patches * hidden),
        "convolutions": 1,
        "config": {"num_labels": labels},
    }


def _whisper(c: Config, v: Values) -> Values:
    hidden, ffn, encoder = v["hidden_size"], v["ffn_size"], v["layers"]
    for what in ("attention_heads", "ffn_dim"):
        ours, theirs = c.whole(f"encoder_{what}"), c.whole(f"decoder_{what}")
        if ours != theirs:
            raise c.wrong(
                f"encoder_{what} is {ours} and decoder_{what} {theirs}",
                "the same in both",
                "costs are means of layers that differ in their lengths and in cross-attention alone",
            )
    frames, targets, decoder, bins = (
        c.whole(name, least=1)
        for name in ("max_source_positions", "max_target_positions", "decoder_layers", "num_mel_bins")
    )
    # Keys have no bias; norms have one.
    attention, block = 4 * hidden**2 + 3 * hidden, 2 * hidden * ffn + ffn + hidden
    layers = encoder * (attention + block + 4 * hidden) + decoder * (2 * attention + block + 6 * hidden)
    words = v["vocab_size"] * (1 if c.given.get("tie_word_embeddings", True) else 2)
    return {
        "parameters": layers + 3 * hidden * (bins + hidden) + (frames + targets + words + 6) * hidden,
        "layers": encoder + decoder,
        "encoder_layers": encoder,
        "encoder_tokens": frames,
        "decoder_tokens": targets,
        "learned_positions": frames + targets,
        # Two convolutions of three frames over the log-mel spectrogram, the second with stride 2.
        "flops_per_sample": 2.0 * frames * 3 * hidden * (2 * bins + hidden),
        "activations_per_sample": 3.0 * frames * hidden,
        "convolutions": 2,
    }


# --- the table --------------------------------------------------------------------------------------------------------

_BIASED = {"attention_bias": "all", "mlp_bias": True, "norm_bias": True}
_GATED = {"gated_mlp": True}
# Every head has keys and values of its own, hidden_size / attention_heads wide.
_EVEN = {"head_dim": "", "kv_heads": ""}
_MOE = {"ffn_size": "moe_intermediate_size", "dense_ffn_size": "intermediate_size"}
_DEEPSEEK = Family(
    names=_MOE | _EVEN | {"experts": "n_routed_experts", "dense_layers": "first_k_dense_replace"},
    facts=_GATED,
    parts=(_first_layers_dense, _latents),
    fixed={"moe_layer_freq": 1, "mlp_bias": False},
)
_BERT = Family(
    names=_EVEN,
    facts=_BIASED | {"architecture": "encoder", "final_norm": False, "embedding_norm": True, "mlm_head": True},
    parts=(_token_types, _learned()),
)
_DEBERTA = Family(
    names=_EVEN,
    facts=_BERT.facts,
    parts=(_token_types, _deberta),
    fixed={
        "embedding_size": None,
        "legacy": True,
        "talking_head": False,
        "attention_head_size": None,
        "conv_groups": 1,
    },
)
_LLAMA = Family(facts=_GATED)
_WINDOWED = Family(facts=_GATED, window_pattern=1)
_QWEN2 = Family(facts=_GATED | {"attention_bias": "qkv"})
_GEMMA3 = Family(facts=_GATED | {"norms_per_layer": 4, "head_norms": True}, window_pattern=6)
_GLM = _GATED | {"attention_bias": "qkv"}
_COHERE = _GATED | {"norms_per_layer": 1, "wide_head_norms": True}
_OLMO2 = _GATED | {"head_norms": True, "wide_head_norms": True}
_LLAMA4 = Family(
    names={"dense_ffn_size": "intermediate_size_mlp"}, facts=_GATED, parts=(_llama4,), fixed={"attention_bias": False}
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _WINDOWED,
    "mixtral": _WINDOWED,
    "phi3": _WINDOWED,
    "qwen2": _QWEN2,
    "qwen3": Family(facts=_GATED | {"head_norms": True}),
    "qwen2_moe": Family(
        names=_MOE | {"experts": "num_experts", "attention_bias": "qkv_bias"},
        facts=_QWEN2.facts,
        parts=(_sparse_steps, _shared_expert),
    ),
    # Qwen 3's mixture has no lower layers that attend fully (modeling_qwen3_moe.py).
    "qwen3_moe": Family(
        names=_MOE,
        facts=_GATED | {"head_norms": True},
        parts=(_sparse_steps,),
        window_pattern=1,
    ),
    "gemma": Family(facts=_GATED),
    "gemma2": Family(facts=_GATED | {"norms_per_layer": 4}, window_pattern=2),
    "gemma3_text": _GEMMA3,
    "gemma3": Family(text="gemma3_text", vision="siglip_vision_model", ties=("whole",)),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm": Family(facts=_GLM),
    "glm4": Family(facts=_GLM | {"norms_per_layer": 4}),
    "glm4_moe": Family(
        names=_MOE | {"dense_layers": "first_k_dense_replace", "head_norms": "use_qk_norm"},
        facts=_GLM,
        parts=(_first_layers_dense,),
    ),
    "gpt_oss": Family(facts=_GATED | {"sinks": True, "attention_bias": "all", "mlp_bias": True}, window_pattern=2),
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "smollm3": _LLAMA,
    "cohere": Family(names={"head_norms": "use_qk_norm"}, facts=_COHERE),
    "cohere2": Family(facts=_GATED | {"norms_per_layer": 1}, window_pattern=4),
    "olmo": Family(facts=_GATED | {"norm_weight": False}),
    "olmo2": Family(facts=_OLMO2),
    "olmo3": Family(facts=_OLMO2, window_pattern=4),
    "olmoe": Family(facts=_OLMO2),
    "llama4_text": _LLAMA4,
    "llama4": Family(text="llama4_text", vision="llama4_vision_model", ties=("text",)),
    "qwen2_vl": Family(text="qwen2_vl_text", vision="qwen2_vl_vision"),
    "qwen2_5_vl": Family(text="qwen2_5_vl_text", vision="qwen2_5_vl_vision"),
    "qwen2_vl_text": Family(names={"head_dim": ""}, facts=_QWEN2.facts),
    "qwen2_5_vl_text": Family(names={"head_dim": ""}, facts=_QWEN2.facts),
    "starcoder2": Family(
        names={"attention_bias": "use_bias", "mlp_bias": "use_bias"}, facts={"norm_bias": True}, window_pattern=1
    ),
    "phi": Family(
        facts=_BIASED | {"norms_per_layer": 1}, parts=(_lm_head_bias,), fixed={"qk_layernorm": False}
    ),
    "falcon": Family(
        names=_EVEN | {"ffn_size": "ffn_hidden_size", "attention_bias": "bias", "mlp_bias": "bias"},
        facts={"norm_bias": True},
        parts=(_falcon,),
        ffn_multiple=4,
    ),
    "gpt2": Family(names=_EVEN | {"ffn_size": "n_inner"}, facts=_BIASED, parts=(_learned(),), ffn_multiple=4),
    "gpt_neox": Family(names=_EVEN, facts=_BIASED),
    "mpt": Family(
        names=_EVEN | {"max_seq_len": "max_seq_len"},
        ffn_multiple=4,
        fixed={
            "expansion_ratio": 4, "no_bias": True, "attn_config.attn_type": "multihead_attention",
            "attn_config.kv_n_heads": None, "attn_config.qk_ln": False, "attn_config.alibi": True,
        },
    ),
    "opt": Family(
        names=_EVEN | {
            "ffn_size": "ffn_dim", "attention_bias": "enable_bias", "mlp_bias": "enable_bias",
            **dict.fromkeys(("norm_weight", "norm_bias"), "layer_norm_elementwise_affine"),
        },
        parts=(_opt, _learned(2)),
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": Family(
        names=_EVEN | {"ffn_size": "hidden_dim"}, facts=_BERT.facts, parts=(_learned(), _one_vocabulary_bias)
    ),
    "modernbert": Family(
        names=_EVEN | {"norm_bias": "norm_bias"},
        facts=_GATED | {"architecture": "encoder", "embedding_norm": True}, parts=(_modernbert,)
    ),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "t5": Family(names={"kv_heads": "", "ffn_size": "d_ff"}, facts={"architecture": "seq2seq"}, parts=(_t5,)),
    "vit": Family(names=_EVEN | {"vocab_size": ""}, facts={"architecture": "image"}, parts=(_vit,)),
    "whisper": Family(
        names=_EVEN | {"ffn_size": "encoder_ffn_dim", "max_seq_len": ""},
        facts={"architecture": "speech"},
        parts=(_whisper,),
    ),
}  # fmt: skip

# Models with layers that carry a state in place of attention: sized where transformers is installed, not planned.
STATE_SPACE = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h",
    "qwen3_next", "zamba", "zamba2",
)  # fmt: skip
