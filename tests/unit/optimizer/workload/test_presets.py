"""Every preset's published parameter count follows from its architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
import transformers

from bootstrap.contract.trainer import family_of
from bootstrap.trainer.models import AUTO
from optimizer.workload.architecture import build_architecture
from optimizer.workload.model import count_parameters
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model

TRANSFORMERS = [name for name, preset in presets().items() if preset.architecture in ("decoder", "encoder")]
ENCODERS = [name for name, preset in presets().items() if preset.architecture in ("seq2seq", "image", "speech")]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_count_derived_from_the_architecture_is_the_published_one(name: str) -> None:
    preset = presets()[name]
    assert count_parameters(preset.model(name), preset.details)[0] == preset.parameters


@pytest.mark.parametrize("name", ENCODERS)
def test_the_count_derived_from_the_config_is_the_published_one(name: str) -> None:
    assert presets()[name].model(name).parameters == presets()[name].parameters


def test_vits_have_the_parameters_that_torchvision_publishes() -> None:
    weights = {
        "vit-b-16": torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1,
        "vit-l-16": torchvision.models.ViT_L_16_Weights.IMAGENET1K_V1,
        "vit-h-14": torchvision.models.ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1,
    }
    for name, published in weights.items():
        assert resolve_model(name).parameters == published.meta["num_params"]


@pytest.mark.parametrize(
    ("name", "millions", "error"),
    [
        # arXiv:1910.10683, section 3.7; the vocabulary has 128 more entries than the paper's.
        ("t5-small", 60, 0.01), ("t5-base", 220, 0.02), ("t5-large", 770, 0.05), ("t5-3b", 2800, 0.02),
        ("t5-11b", 11000, 0.03),
        # arXiv:2212.04356, table 1.
        ("whisper-tiny", 39, 0.04), ("whisper-base", 74, 0.02), ("whisper-small", 244, 0.01),
        ("whisper-medium", 769, 0.01), ("whisper-large-v3", 1550, 0.005),
    ],
)  # fmt: skip
def test_encoders_with_decoders_have_the_published_parameters(name: str, millions: float, error: float) -> None:
    assert resolve_model(name).parameters / 1e6 == pytest.approx(millions, rel=error)


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_source_and_resolves_by_name(name: str) -> None:
    model = resolve_model(name)
    assert model.name == name
    assert "://" in model.source
    assert 0 < model.active_parameters <= model.parameters


def test_presets_the_documentation_promises() -> None:
    promised = {
        "resnet50", "bert-large", "gpt2-xl", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-2-7b",
        "llama-2-13b", "llama-2-70b", "mixtral-8x7b",
    }  # fmt: skip
    assert promised <= set(presets())


def test_a_token_of_a_mixture_passes_through_the_published_active_parameters() -> None:
    # https://mistral.ai/news/mixtral-of-experts: 46.7B in total, 12.9B a token.
    model = resolve_model("mixtral-8x7b")
    assert model.parameters == pytest.approx(46.7e9, rel=0.001)
    assert model.active_parameters == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_layers_and_embeddings_add_up_to_the_model(name: str) -> None:
    model = resolve_model(name)
    mixture_or_all = (model.layers - model.dense_layers) * model.layer_parameters
    layers = mixture_or_all + model.dense_layers * model.dense_layer_parameters
    assert layers + model.embedding_parameters == pytest.approx(model.parameters)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # Published counts, billions, and what they leave out: model cards and reports named in presets.toml.
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("deepseek-v3", 671.0, 37.0),
        ("gpt-oss-20b", 20.91, 3.61),
        ("gpt-oss-120b", 116.83, 5.13),
    ],
)
def test_mixtures_have_the_published_total_and_active_parameters(name: str, total: float, active: float) -> None:
    model = resolve_model(name)
    embedding = model.vocab_size * model.hidden_size if name.startswith("gpt-oss") else 0
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.002)
    assert (model.active_parameters - embedding) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "embedding", "other"),
    [
        # arXiv:2408.00118, table 2, and arXiv:2503.19786, table 1, millions.
        ("gemma-2-2b", 590, 2024), ("gemma-2-9b", 918, 8324), ("gemma-2-27b", 1180, 26047),
        ("gemma-3-1b", 302, 698), ("gemma-3-4b", 675, 3209), ("gemma-3-12b", 1012, 10759), ("gemma-3-27b", 1416, 25600),
    ],
)  # fmt: skip
def test_gemmas_have_the_published_parameters(name: str, embedding: int, other: int) -> None:
    model = resolve_model(name)
    assert model.embedding_parameters / 1e6 == pytest.approx(embedding, rel=0.006)
    assert (model.parameters - model.embedding_parameters) / 1e6 == pytest.approx(other, rel=0.002)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "bert-base", "qwen3-0.6b", "qwen3-30b-a3b",
        "qwen3-235b-a22b", "gemma-2-27b", "gemma-3-1b", "gemma-3-27b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b",
        "t5-small", "t5-11b", "vit-b-16", "vit-h-14", "whisper-tiny", "whisper-large-v3",
    ],
)  # fmt: skip
def test_transformers_builds_a_preset_with_its_published_parameters(name: str) -> None:
    model = resolve_model(name)
    architecture = build_architecture(model)
    assert architecture is not None
    kind = getattr(transformers, AUTO[family_of(architecture)])
    with torch.device("meta"):
        module = kind.from_config(transformers.AutoConfig.for_model(**architecture))
    assert sum(weight.numel() for weight in module.parameters()) == model.parameters


@pytest.mark.parametrize(
    "fields",
    [
        {"num_decoder_layers": None}, {"num_decoder_layers": 1, "relative_attention_num_buckets": 5},
        {"feed_forward_proj": "gated-gelu"}, {"feed_forward_proj": "gated-gelu", "is_gated_act": False},
        {"is_gated_act": True}, {"d_kv": 5},
    ],
)  # fmt: skip
def test_t5s_odd_fields_are_counted_as_transformers_builds_them(fields: dict[str, Any]) -> None:
    config: dict[str, Any] = {
        "model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 3, "num_heads": 8, "vocab_size": 256,
    }  # fmt: skip
    built: Any = transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        module = built.from_config(transformers.AutoConfig.for_model(**config | fields))
    assert sum(weight.numel() for weight in module.parameters()) == resolve_model(config | fields).parameters


def test_whispers_output_projection_is_counted_where_it_is_not_the_embedding() -> None:
    config: dict[str, Any] = {
        "model_type": "whisper", "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128,
        "vocab_size": 51003, "num_mel_bins": 80, "tie_word_embeddings": False,
    }  # fmt: skip
    model = resolve_model(config)
    built: Any = transformers.AutoModelForSpeechSeq2Seq
    with torch.device("meta"):
        module = built.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(weight.numel() for weight in module.parameters()) == model.parameters
    assert not model.tied_embeddings


# Fields that a config.json leaves out, or that only some configurations of its kind set.
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


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 1}),
        ("mistral", {}),
        ("mixtral", {}),
        ("phi3", {"num_key_value_heads": 4}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", EXPERTS | {"num_experts": 4, "mlp_only_layers": [0, 3], "use_sliding_window": True}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3_text", {"sliding_window": 64}),
        ("gpt_oss", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4, "attention_bias": False}),
        ("deepseek_v3", LATENT),
        ("deepseek_v3", LATENT | {"attention_bias": True, "first_k_dense_replace": 9}),
        ("deepseek_v3", LATENT | {"q_lora_rank": None}),  # Moonlight
        ("deepseek_v3", LATENT | {"q_lora_rank": None, "attention_bias": True}),
        ("qwen3_moe", EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "intermediate_size": "default"}),
        ("deepseek_v3", LATENT | {"intermediate_size": "default"}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt_neox", {"head_dim": 24, "num_key_value_heads": 4}),
        ("bert", {"head_dim": 24, "num_key_value_heads": 4}),
        ("opt", {"ffn_dim": 700, "head_dim": 24, "num_key_value_heads": 4}),
        ("opt", {"ffn_dim": 700}),
        ("opt", {"ffn_dim": 700, "word_embed_proj_dim": 128, "do_layer_norm_before": False}),  # OPT-350m
        ("opt", {"ffn_dim": 700, "word_embed_proj_dim": 128, "tie_word_embeddings": False}),
        ("opt", {"ffn_dim": 700, "enable_bias": False, "layer_norm_elementwise_affine": False}),  # Galactica 6.7B
        ("opt", {"ffn_dim": 700, "enable_bias": False, "_remove_final_layer_norm": True}),
        ("bert", {"type_vocab_size": 5}),
        ("bert", {"tie_word_embeddings": False}),
        ("roberta", {}),
        ("roberta", {"tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_transformers_builds_a_config_with_the_counted_parameters_and_windows(
    kind: str, fields: dict[str, Any]
) -> None:
    config = {"model_type": kind, **SMALL, **fields}
    config = {name: value for name, value in config.items() if value != "default"}
    model = resolve_model(config)
    built: Any = transformers.AutoModelForCausalLM
    if model.architecture == "encoder":
        built = transformers.AutoModelForMaskedLM
    kept = build_architecture(model) or {}
    if kept.get("q_lora_rank") == 0:  # a plan has no null
        kept["q_lora_rank"] = None
    for architecture in (config, kept):
        settings = transformers.AutoConfig.for_model(**architecture)
        with torch.device("meta"):
            module = built.from_config(settings)
        assert sum(weight.numel() for weight in module.parameters()) == model.parameters
        types = getattr(settings, "layer_types", None) or model.layers * ["sliding_attention"]
        windowed = types.count("sliding_attention") if getattr(settings, "sliding_window", None) else 0
        assert model.windowed_layers == windowed
