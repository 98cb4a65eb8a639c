"""Every preset's published parameter count follows from its architecture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optimizer.workload.families import FAMILIES
from optimizer.workload.huggingface import CONFIG_DEFAULTS, model_from_config
from optimizer.workload.named_entries import read_entries
from optimizer.workload.presets import PRESETS, presets
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.workload.families import CASES, built
from tools.config_defaults import class_defaults

TRANSFORMERS = [name for name, preset in presets().items() if preset.architecture in ("decoder", "encoder")]


@pytest.mark.parametrize(("name", "entry"), read_entries(PRESETS).items())
def test_the_count_derived_from_the_architecture_is_the_published_one(name: str, entry: dict[str, Any]) -> None:
    assert presets()[name].parameters == entry["parameters"]


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_source_and_resolves_by_name(name: str) -> None:
    model = resolve_model(name)
    assert model.name == name
    assert "://" in model.source
    assert 0 < model.active_parameters <= model.parameters


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
        ("mixtral-8x7b", 46.7, 12.9),
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
    "name",
    [
        "gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "bert-base", "qwen3-0.6b", "qwen3-30b-a3b",
        "qwen3-235b-a22b", "gemma-2-27b", "gemma-3-1b", "gemma-3-27b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b",
        "t5-small", "t5-11b", "vit-b-16", "vit-h-14", "whisper-tiny", "whisper-large-v3",
    ],
)  # fmt: skip
def test_transformers_builds_a_preset_with_its_published_parameters(name: str) -> None:
    model = resolve_model(name)
    assert model.build_config is not None
    assert built(model.build_config, model)[0] == model.parameters


@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_transformers_builds_a_config_with_the_counted_parameters_and_windows(
    kind: str, fields: dict[str, Any]
) -> None:
    config = {"model_type": kind, **fields}
    model = model_from_config(config, name=kind, origin="here")
    assert model.build_config is not None
    for architecture in (config, json.loads(json.dumps(model.build_config))):
        count, settings = built(architecture, model)
        assert count == model.parameters
        text = settings.get_text_config()
        types = getattr(text, "layer_types", None) or model.layers * ["sliding_attention"]
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
        sees = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "local_attention")]
        assert model.windowed_layers == (windowed if any(sees) else 0)


def test_every_family_has_a_small_config() -> None:
    nested = {family.text for family in FAMILIES.values()}
    assert {kind for kind, _ in CASES} == set(FAMILIES) - (nested - {"gemma3_text", "llama4_text"})


def test_the_shipped_defaults_are_those_of_the_installed_transformers() -> None:
    shipped = json.loads(CONFIG_DEFAULTS.read_text(encoding="utf-8"))
    for kind, known in shipped.items():
        assert class_defaults(kind) == known, kind
