"""Small configurations of every family, and what transformers builds of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from bootstrap.contract.trainer import AUTO, class_fields
from optimizer.workload.model import ModelSpec

SMALL = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 5, "num_attention_heads": 32,
    "vocab_size": 1003, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENTS = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20,
    "num_key_value_heads": 32,
}  # fmt: skip
LATENT = EXPERTS | LATENTS | {"n_routed_experts": 8}
NARROW = {"word_embed_proj_dim": 128}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0}
T5 = {"d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 3, "num_heads": 8, "vocab_size": 256}
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "vocab_size": 51003, "num_mel_bins": 80,
}  # fmt: skip
GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 128, "vocab_size": 1003}
DISTILBERT = {"dim": 256, "n_layers": 3, "n_heads": 8, "hidden_dim": 640, "vocab_size": 1003}
MPT = {"d_model": 256, "n_layers": 3, "n_heads": 8, "vocab_size": 1003, "max_seq_len": 128}
TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
OUT = {"num_heads": 4, "out_hidden_size": 256}
TEXT = {name: SMALL[name] for name in SMALL if name != "pad_token_id"} | {"num_key_value_heads": 4}

_OF_SMALL: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 1}],
    "mistral": [{}, {"sliding_window": None, "max_position_embeddings": 512}],
    "mixtral": [{"num_local_experts": 8}, {"num_experts": 4}],
    "phi3": [{"num_key_value_heads": 4}],
    "qwen2": [
        {"use_sliding_window": True, "max_window_layers": 0, "num_key_value_heads": 8}, {"num_key_value_heads": None},
    ],
    "qwen3": [{"attention_bias": True, "num_key_value_heads": 8}],
    "qwen2_moe": [EXPERTS, EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "qkv_bias": False}],
    "qwen3_moe": [
        EXPERTS,
        EXPERTS | {"num_experts": 4, "mlp_only_layers": [0, 3], "use_sliding_window": True},
        EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "intermediate_size": "default"},
        EXPERTS | {"num_local_experts": 4, "decoder_sparse_step": 2},
    ],
    "gemma": [{"num_key_value_heads": 1}],
    "gemma2": [
        {"attention_bias": True, "attn_logit_softcapping": 40.0},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ],
    "gemma3_text": [{"sliding_window": 64}, {"sliding_window_pattern": 3, "final_logit_softcapping": 30.0}],
    "gpt_oss": [{"num_local_experts": 4}, {"num_local_experts": 4, "attention_bias": False}],
    "deepseek_v2": [LATENT | {"first_k_dense_replace": 1}, LATENT | {"q_lora_rank": None}],
    "deepseek_v3": [
        LATENT,
        LATENT | {"attention_bias": True, "first_k_dense_replace": 9},
        LATENT | {"q_lora_rank": None},  # Moonlight
        LATENT | {"q_lora_rank": None, "attention_bias": True},
        LATENT | {"intermediate_size": "default"},
    ],
    "glm": [{"num_key_value_heads": 4}],
    "glm4": [{"num_key_value_heads": 4, "attention_bias": False}],
    "glm4_moe": [EXPERTS, EXPERTS | {"n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True}],
    "granite": [{"mlp_bias": True, "num_key_value_heads": 4}],
    "granitemoe": [{"num_local_experts": 4}],
    "smollm3": [{"num_key_value_heads": 4}],
    "cohere": [{"num_key_value_heads": 4}, {"use_qk_norm": True, "num_key_value_heads": 4}],
    "cohere2": [{"num_key_value_heads": 4}],
    "olmo": [{}],
    "olmo2": [{"num_key_value_heads": 4, "attention_bias": True}],
    "olmo3": [{"num_key_value_heads": 4}],
    "olmoe": [{"num_experts": 8, "num_key_value_heads": 4}],
    "llama4_text": [
        {"intermediate_size_mlp": 320, "num_local_experts": 4, "interleave_moe_layer_step": 2, "head_dim": 16},
        {"moe_layers": [1, 4], "no_rope_layers": [1, 0, 1, 1, 0], "num_local_experts": 4},
        {"no_rope_layers": [], "num_local_experts": 4},  # as published
    ],
    "starcoder2": [{}, {"use_bias": False, "sliding_window": 64, "num_key_value_heads": 4}],
    "phi": [{"num_key_value_heads": 4}],
    "falcon": [
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 8, "bias": True},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 512},
        {"multi_query": None, "parallel_attn": None, "num_kv_heads": 4, "tie_word_embeddings": False},
    ],
    "gpt_neox": [{"attention_bias": False}, {"head_dim": 24, "num_key_value_heads": 4}],
    "opt": [
        {"ffn_dim": 700, "head_dim": 24, "num_key_value_heads": 4},
        {"ffn_dim": 700} | NARROW | {"do_layer_norm_before": False},  # OPT-350m
        {"ffn_dim": 700} | NARROW | {"tie_word_embeddings": False},
        {"ffn_dim": 700, "enable_bias": False, "layer_norm_elementwise_affine": False},  # Galactica 6.7B
        {"ffn_dim": 700, "enable_bias": False, "_remove_final_layer_norm": True},
    ],
    "bert": [{"type_vocab_size": 5}, {"tie_word_embeddings": False}, {"head_dim": 24, "num_key_value_heads": 4}],
    "roberta": [{}, {"tie_word_embeddings": False}],
    "xlm-roberta": [{"max_position_embeddings": 514}],
    "modernbert": [{}, {"norm_bias": True, "classifier_bias": True, "mlp_bias": True, "attention_bias": True}],
    "deberta": [DISENTANGLED | {"max_relative_positions": -1}, {"position_biased_input": False}],
    "deberta-v2": [
        DISENTANGLED | {"position_buckets": 64, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        DISENTANGLED | {"conv_kernel_size": 3, "position_biased_input": False, "type_vocab_size": 2},
    ],
    "vit": [{"image_size": 64, "patch_size": 16}, {"image_size": 64, "patch_size": 8, "qkv_bias": False}],
}  # fmt: skip
_OWN: dict[str, list[dict[str, Any]]] = {
    "gpt2": [GPT2, GPT2 | {"n_inner": 700}],
    "mpt": [MPT | {"attn_config": {"clip_qkv": 6}}],
    "distilbert": [DISTILBERT, DISTILBERT | {"tie_word_embeddings": False}],
    "t5": [
        T5 | {"num_decoder_layers": None}, T5 | {"num_decoder_layers": 1, "relative_attention_num_buckets": 5},
        T5 | {"feed_forward_proj": "gated-gelu"}, T5 | {"feed_forward_proj": "gated-gelu", "is_gated_act": False},
        T5 | {"is_gated_act": True}, T5 | {"d_kv": 5},
    ],
    "whisper": [WHISPER, WHISPER | {"tie_word_embeddings": False}],
    "gemma3": [
        {"text_config": TEXT, "vision_config": TOWER | {"image_size": 64, "patch_size": 16}},
        {"text_config": TEXT | {"tie_word_embeddings": False}, "vision_config": TOWER | {"vision_use_head": False}},
        {"text_config": TEXT, "vision_config": TOWER | {"num_channels": 4}, "tie_word_embeddings": False},
    ],
    "llama4": [
        {
            "text_config": TEXT | {"intermediate_size_mlp": 320, "num_local_experts": 4, "pad_token_id": 0} | text_ties,
            "vision_config": TOWER | {"projector_input_dim": 48, "projector_output_dim": 40, "vision_output_dim": 40},
            "tie_word_embeddings": True,
        }
        for text_ties in ({}, {"tie_word_embeddings": True})
    ],
    "qwen2_vl": [
        {
            "text_config": TEXT | {"tie_word_embeddings": True},
            "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 256},
        },
        TEXT | {"vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 256}, "tie_word_embeddings": True},
    ],
    "qwen2_5_vl": [
        {"text_config": TEXT, "vision_config": {"hidden_size": 64, "intermediate_size": 96, "depth": 2} | OUT},
    ],
}  # fmt: skip
CASES = [
    (kind, {name: value for name, value in (SMALL | fields).items() if value != "default"})
    for kind, cases in _OF_SMALL.items()
    for fields in cases
] + [(kind, fields) for kind, cases in _OWN.items() for fields in cases]


def built(config: Mapping[str, Any], model: ModelSpec) -> tuple[int, Any]:
    """Parameters and settings of the model that transformers builds, from a configuration as Pulumi writes it."""
    auto = "AutoModelForImageTextToText" if model.tower_parameters else AUTO[model.architecture]
    plain = json.loads(
        json.dumps(config), parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text)
    )
    settings = transformers.AutoConfig.for_model(
        **class_fields(plain, transformers.CONFIG_MAPPING[config["model_type"]])
    )
    with torch.device("meta"):
        module = getattr(transformers, auto).from_config(settings)
    return sum(parameter.numel() for parameter in module.parameters()), settings
