from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract.trainer import with_nulls
from optimizer.contract.errors import InvalidInputError
from optimizer.workload.huggingface import model_from_config
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model
from optimizer.workload.size_rule import RULE_MODELS, depth
from tests.unit.optimizer.workload.families import CASES

# config.json files as published on Hugging Face, with the published parameter count.
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
         "tie_word_embeddings": False},
        6_738_415_616,
    ),
    "qwen3-8b": (
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "tie_word_embeddings": False},
        8_190_735_360,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432, "max_seq_len": 2048,
         "expansion_ratio": 4},
        6_649_286_656,
    ),
}  # fmt: skip


VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 3, "image_size": 224, "patch_size": 16, "id2label": {"0": "cat", "1": "dog", "2": "cow"},
}  # fmt: skip
WHISPER = dict(presets()["whisper-tiny"].config or {})
T5 = dict(presets()["t5-small"].config or {})
LLAMA = CONFIGS["llama-2-7b"][0]
MPT = CONFIGS["mpt-7b"][0]
MIXTURE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 8}


def test_layers_drop_where_the_config_says_so_and_by_default_as_the_class_does() -> None:
    neox = LLAMA | {"model_type": "gpt_neox"}
    assert not resolve_model(neox).has_dropout and resolve_model(neox | {"hidden_dropout": 0.1}).has_dropout
    bert = LLAMA | {"model_type": "bert"}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0}
    assert resolve_model(bert).has_dropout and not resolve_model(bert | none).has_dropout


def test_experts_may_have_two_names_of_one_value() -> None:
    config = MIXTURE | {"num_experts": 16}
    assert resolve_model(config).parameters == resolve_model(config | {"num_local_experts": 16}).parameters


def test_labels_of_an_image_encoder_are_counted() -> None:
    three = resolve_model(VIT)
    assert three.config is not None
    assert three.config["num_labels"] == three.vocab_size == 3
    assert resolve_model(VIT | {"num_labels": 4}).parameters - three.parameters == 192 + 1


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_published_count(name: str, tmp_path: Path) -> None:
    config, parameters = CONFIGS[name]
    (tmp_path / name).mkdir()
    path = tmp_path / name / "config.json"
    path.write_text(json.dumps(config))
    model = resolve_model(str(path))
    assert model.parameters == parameters
    assert model.name == name
    assert resolve_model(str(path.parent)) == model
    assert resolve_model(config).parameters == parameters


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "an object without model_type"),
        ("[1, 2]", "a JSON list"),
        ("not json", "is not JSON"),
        ('{"hidden_size": ' + 5000 * "9" + "}", "is not JSON"),
        ("\ufeff{}", "an object without model_type"),
        ('{"model_type": "resnet"}', "model_type is 'resnet'"),
        ('{"model_type": "llama", "hidden_size": 4096}', "num_hidden_layers, num_attention_heads, vocab_size"),
        (
            '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, '
            '"vocab_size": 32000}',
            "lacks intermediate_size",
        ),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "n_embd is 'wide'"),
        ('{"model_type": "t5", "d_model": 512}', "lacks num_layers, num_heads, vocab_size, d_ff"),
        (json.dumps(VIT | {"patch_size": 15}), "image_size is 224 and patch_size 15"),
        (json.dumps(VIT | {"num_channels": 1}), "num_channels is 1"),
        (json.dumps(VIT | {"num_attention_heads": 5}), "num_attention_heads is 5"),
        (json.dumps(VIT | {"image_size": [224, 196]}), "image_size is [224, 196]"),
        (json.dumps(WHISPER | {"decoder_ffn_dim": 1024}), "encoder_ffn_dim is 1536 and decoder_ffn_dim 1024"),
        (json.dumps(VIT | {"num_labels": 0}), "num_labels is 0"),
        (json.dumps(LLAMA | {"num_key_value_heads": 0}), "num_key_value_heads is 0"),
        (json.dumps(LLAMA | {"model_type": "qwen3", "head_dim": None}), "head_dim is None"),
        (json.dumps(LLAMA | {"model_type": "mistral", "num_key_value_heads": None}), "num_key_value_heads is None"),
        (json.dumps(LLAMA | {"model_type": "glm", "num_key_value_heads": None}), "num_key_value_heads is None"),
        (json.dumps(LLAMA | {"model_type": "opt", "ffn_dim": 1, "word_embed_proj_dim": 0}), "word_embed_proj_dim is 0"),
        (json.dumps(LLAMA | {"model_type": "gpt_neox", "attention_bias": None}), "attention_bias is None"),
        (json.dumps(LLAMA | {"tie_word_embeddings": None}), "tie_word_embeddings is None"),
        (json.dumps(LLAMA | {"rms_norm_eps": None}), "the class of llama takes no null there"),
        (json.dumps(LLAMA | {"model_type": "bert", "type_vocab_size": None}), "type_vocab_size is None"),
        (json.dumps(LLAMA | {"model_type": "gpt_oss", "num_local_experts": None}), "num_local_experts is None"),
        (json.dumps(MIXTURE | {"num_experts": 0}), "num_experts is 0"),
        (json.dumps(MPT | {"attn_config": {"attn_type": "grouped_query_attention"}}), "attn_config.attn_type is"),
        (json.dumps(MPT | {"attn_config": {"kv_n_heads": 8}}), "attn_config.kv_n_heads is 8"),
        (json.dumps(LLAMA | {"hidden_size": 4097}), "num_attention_heads is 32"),
        (json.dumps(LLAMA | {"model_type": "qwen3", "layer_types": ["sliding_attention"]}), "layer_types has 1"),
        (json.dumps(LLAMA | {"model_type": "llama4_text", "no_rope_layers": [1]}), "no_rope_layers has 1 entries"),
        ('{"model_type": "llama4", "vision_config": {"num_attention_heads": 5}}', "num_attention_heads is 5"),
        ('{"model_type": "qwen2_vl", "vision_config": {"mlp_ratio": NaN}}', "a field has a value of another kind"),
        (json.dumps(MIXTURE | {"num_experts": 8, "num_local_experts": 4}), "num_local_experts is 4"),
        ('{"model_type": "gpt2", "n_embd": -768}', "n_embd is -768"),
        ('{"model_type": "gpt2", "n_embd": 768, "add_cross_attention": true}', "add_cross_attention is True"),
    ],
)
def test_a_file_that_is_no_models_config_says_what_is_missing(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as error:
        resolve_model(str(path))
    assert says in str(error.value)
    assert str(path) in str(error.value)


ODD: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 1.5, True, [1, "a"], {"a": None})
ANYWHERE = ("layer_types", "text_config", "vision_config", "pad_token_id", "moe_layers", "attn_config", "null_fields")


@pytest.mark.parametrize(("kind", "fields"), dict(CASES).items())
def test_a_value_of_another_kind_is_an_error_of_the_input(kind: str, fields: dict[str, Any]) -> None:
    for name in (*fields, *ANYWHERE):
        for value in ODD:
            with contextlib.suppress(InvalidInputError):
                model_from_config({"model_type": kind, **fields, name: value}, name=kind, origin="here")


@pytest.mark.parametrize("dropped", [{"attn_logit_softcapping": None, "final_logit_softcapping": None}, {}])
def test_a_null_that_is_not_the_default_reaches_the_nodes(dropped: dict[str, Any]) -> None:
    model = resolve_model({"model_type": "gemma2", **dict(CASES)["gemma"], **dropped})
    assert model.soft_cap is model.logits_soft_cap is (not dropped)
    assert (with_nulls(model.build_config or {}).get("attn_logit_softcapping", 50.0) is None) is bool(dropped)


def test_a_kind_without_a_row_is_sized_and_no_advice_leads_to_another_model() -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "pad_token_id": 0}
    with pytest.raises(InvalidInputError, match=r"'jamba': [\d,]+ parameters") as error:
        resolve_model({"model_type": "jamba", "num_attention_heads": 4, "num_key_value_heads": 2, **small})
    assert "would train a Llama instead" in str(error.value) and "carry a state" in str(error.value)


def test_what_transformers_does_not_build_is_refused_before_a_node_is_paid() -> None:
    with pytest.raises(InvalidInputError, match="does not build this llama: StrictDataclass"):
        resolve_model(LLAMA | {"hidden_act": 7})
    with pytest.raises(InvalidInputError, match="pad_token_id is 32000"):  # without transformers too
        model_from_config(LLAMA | {"pad_token_id": 32000}, name="llama", origin="here")


def test_a_count_that_contradicts_the_fields_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"800,000,000, and the fields make 6,738,415,616"):
        resolve_model(FIELDS | {"parameters": 800_000_000})
    assert resolve_model(FIELDS | {"parameters": 6_800_000_000}).parameters == 6_800_000_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("missing/config.json", "cannot be read"),
        ("llama3.1-8b", r"did you mean llama-3\.1-8b"),
        ("10M", "50,000,000 to"),
        ("9000000B", "50,000,000 to"),
        ("0", "model"),
        ("1.5", "model"),
        ("7B7", "model"),
        ("0.5", "next: a count such as 500M or 7B"),
    ],
)
def test_a_text_that_names_no_model(text: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as error:
        resolve_model(text)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(("text", "count"), [("7B", 7e9), ("350M", 350e6), ("1.3b", 1.3e9), (7_000_000_000, 7e9)])
def test_a_parameter_count_keeps_the_count_and_says_it_is_derived(text: str | int, count: float) -> None:
    model = resolve_model(text)
    assert model.parameters == count
    assert "derived from the parameter count" in model.source


@pytest.mark.parametrize("count", [125e6, 350e6, 1.3e9, 2.7e9, 6.7e9, 13e9, 34e9, 70e9, 175e9, 405e9])
def test_the_size_rules_shape_has_nearly_the_count(count: float) -> None:
    model = resolve_model(round(count))
    weights = model.layers * model.active_layer_matrix_parameters + model.embedding_parameters
    assert weights == pytest.approx(count, rel=0.04)
    assert model.attention_heads * model.head_dim == model.hidden_size


@pytest.mark.parametrize("count", [20e9, 34e9, 65e9, 70e9, 123e9, 175e9, 405e9, 1e12])
def test_eight_tensor_ranks_divide_the_shape_of_a_large_model(count: float) -> None:
    model = resolve_model(round(count))
    assert model.attention_heads % 8 == 0 and model.kv_heads == 8


def test_the_size_rules_depth_is_near_published_depths() -> None:
    errors = [depth(count) / layers - 1 for count, layers in RULE_MODELS]
    assert sum(abs(error) for error in errors) / len(errors) < 0.17
    assert max(abs(error) for error in errors) < 0.5


FIELDS: dict[str, Any] = {
    "layers": 32, "hidden_size": 4096, "ffn_size": 11008, "attention_heads": 32, "vocab_size": 32000,
}  # fmt: skip


def test_architecture_fields() -> None:
    model = resolve_model(FIELDS)
    assert model.parameters == 6_738_415_616
    assert (model.kv_heads, model.head_dim, model.gated_mlp) == (32, 128, True)
    assert resolve_model(FIELDS | {"parameters": "6.74B"}).parameters == 6_740_000_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": None}, "model.layers"),
        ({"layers": 0}, "model.layers"),
        ({"vocab_size": True}, "model.vocab_size: a number is needed, not yes or no"),
        ({"experts": True}, "model.experts: a number is needed, not yes or no"),
        ({"width": 3}, "model.width"),
        ({"hidden_size": 4100}, "head_dim"),
        ({"architecture": "cnn"}, "preset"),
    ],
)
def test_wrong_architecture_fields_are_named(change: dict[str, Any], says: str) -> None:
    fields = {name: value for name, value in (FIELDS | change).items() if value is not None}
    with pytest.raises(InvalidInputError) as error:
        resolve_model(fields)
    assert says in str(error.value)


def test_a_config_is_kept_as_far_as_it_builds_the_model() -> None:
    published = CONFIGS["llama-2-7b"][0] | {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "4.31.0",
        "torch_dtype": "float16",
        "id2label": {str(i): "x" for i in range(1000)},
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 32,
        "rms_norm_eps": 1e-5,
    }
    kept = resolve_model(published).build_config
    assert kept == CONFIGS["llama-2-7b"][0] | {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("kind", "named", "other"),
    [
        ("llama-2-7b", "LlamaForCausalLM", ""),
        ("llama-2-7b", "LlamaForSequenceClassification", "AutoModelForCausalLM"),
        ("bert-large", "BertForPreTraining", ""),
        ("bert-large", "BertModel", ""),
        ("bert-large", "BertForTokenClassification", "AutoModelForMaskedLM"),
        ("t5-small", "T5WithLMHeadModel", ""),
        ("t5-small", "T5EncoderModel", "AutoModelForSeq2SeqLM"),
    ],
)
def test_another_head_than_the_plans_is_noted(kind: str, named: str, other: str) -> None:
    config = resolve_model(kind).config
    assert config is not None
    note = resolve_model({**config, "architectures": [named]}).head_note
    assert (named in note and other in note) if other else not note


def test_a_window_that_is_off_stays_off() -> None:
    """Pulumi's configuration has no null, and Mistral's default is a window of 4096."""
    config = CONFIGS["llama-2-7b"][0] | {"model_type": "mistral", "sliding_window": None}
    kept = resolve_model(config).build_config
    assert kept is not None and kept["null_fields"] == ["sliding_window"] and "sliding_window" not in kept
    within = resolve_model(config | {"rope_scaling": {"rope_type": "default", "factor": None}}).build_config
    assert within is not None and within["rope_scaling"] == {"rope_type": "default", "null_fields": ["factor"]}


def test_fields_of_llamas_kind_can_be_built() -> None:
    fields = {"layers": 4, "hidden_size": 256, "ffn_size": 688, "attention_heads": 8, "kv_heads": 2, "vocab_size": 1000}
    built = resolve_model(fields).build_config
    assert built is not None and (built["model_type"], built["num_key_value_heads"]) == ("llama", 2)
    assert resolve_model(fields | {"gated_mlp": False}).build_config is None
    assert resolve_model("7B").build_config is None
