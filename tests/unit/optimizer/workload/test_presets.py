"""Every preset's published parameter count follows from its architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from optimizer.workload.architecture import build_architecture
from optimizer.workload.model import count_parameters
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model

TRANSFORMERS = [name for name, preset in presets().items() if preset.architecture != "cnn"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_count_derived_from_the_architecture_is_the_published_one(name: str) -> None:
    preset = presets()[name]
    assert count_parameters(preset.model(name), preset.details)[0] == preset.parameters


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
    ],
)  # fmt: skip
def test_transformers_builds_a_preset_with_its_published_parameters(name: str) -> None:
    model = resolve_model(name)
    architecture = build_architecture(model)
    assert architecture is not None
    kind = AutoModelForMaskedLM if model.architecture == "encoder" else AutoModelForCausalLM
    with torch.device("meta"):
        module = kind.from_config(AutoConfig.for_model(**architecture))  # type: ignore[no-untyped-call]
    assert sum(weight.numel() for weight in module.parameters()) == model.parameters
