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
    assert model.layers * model.layer_parameters + model.embedding_parameters == pytest.approx(model.parameters)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "mistral-7b", "qwen2.5-7b", "bert-base"])
def test_transformers_builds_a_preset_with_its_published_parameters(name: str) -> None:
    model = resolve_model(name)
    architecture = build_architecture(model)
    assert architecture is not None
    kind = AutoModelForMaskedLM if model.architecture == "encoder" else AutoModelForCausalLM
    with torch.device("meta"):
        module = kind.from_config(AutoConfig.for_model(**architecture))  # type: ignore[no-untyped-call]
    assert sum(weight.numel() for weight in module.parameters()) == model.parameters
