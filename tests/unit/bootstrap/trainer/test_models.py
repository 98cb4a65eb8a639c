"""Models on the meta device, made layer by layer: the weights, ties and attention of transformers' own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import UNMASKED, blocks, build, materialise
from bootstrap.training.errors import ConfigurationError

SEQ_LEN = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "window", "attention"),
    [
        ("qwen3", None, UNMASKED),
        ("gemma3_text", 512, UNMASKED),
        ("gemma3_text", 16, "sdpa"),
        # Soft caps have no kernel.
        ("gemma2", 512, "eager"),
        ("gemma2", 16, "eager"),
    ],
)
def test_a_tied_model_computes_what_transformers_does(kind: str, window: int | None, attention: str) -> None:
    architecture = SHAPE | {"model_type": kind} | ({"sliding_window": window} if window else {})
    model: Any = build(TrainerConfig(architecture=architecture, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))
    assert model.config._attn_implementation == attention
    for part in (*blocks(model), model):
        materialise(model, part, device=torch.device("cpu"), seed=0)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    settings: Any = AutoConfig
    reference: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        settings.for_model(**json.loads(json.dumps(architecture))), attn_implementation="eager"
    )
    reference.load_state_dict(model.state_dict())
    tokens = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN) % SHAPE["vocab_size"]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, reference(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (SHAPE | {"model_type": "llama"}, "pad_token_id", 128),
        (SHAPE | {"model_type": "llama"}, "hidden_act", "none"),
        (SHAPE | {"model_type": "llama"}, "hidden_size", "wide"),
        (SHAPE | {"model_type": "llama"}, "num_key_value_heads", 3),
        ({}, "torchvision", "resnet9"),
        ({"torchvision": "resnet18"}, "num_classes", -1),
    ],
)
def test_whatever_stops_a_library_from_building_is_a_fault_of_the_settings(
    base: dict[str, Any], name: str, value: object
) -> None:
    architecture = base | {name: value}
    with pytest.raises(ConfigurationError, match=r"does not build this (llama|resnet)"):
        build(TrainerConfig(architecture=architecture, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))


def test_groups_of_heads_are_counted_where_the_model_has_them() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 128, "num_key_value_heads": 3}
    build(TrainerConfig(architecture=gpt2, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))


def test_nulls_that_a_plan_names_and_whole_floats_as_pulumi_writes_them_are_the_models() -> None:
    more = {"model_type": "gemma2", "null_fields": ["attn_logit_softcapping"], "final_logit_softcapping": 20}
    model: Any = build(TrainerConfig(architecture=SHAPE | more, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))
    assert (model.config.attn_logit_softcapping, model.config.final_logit_softcapping) == (None, 20.0)


@pytest.mark.parametrize("kind", ["gemma3_text", "phi3"])
def test_the_padding_token_is_a_token_like_any_other(kind: str) -> None:
    """A row of zeros makes the gradient 10²⁷ within six of Gemma's layers, and a number no more within ten."""
    more = {"model_type": kind, "num_hidden_layers": 10, "pad_token_id": 0, "tie_word_embeddings": False}
    architecture = SHAPE | more
    model: Any = build(TrainerConfig(architecture=architecture, seq_len=SEQ_LEN, global_batch=2, gpus_per_node=1))
    for part in (*blocks(model), model):
        materialise(model, part, device=torch.device("cpu"), seed=0)
    tokens = torch.arange(SEQ_LEN)[None]
    torch.nn.functional.cross_entropy(model(tokens).logits[0], (tokens[0] + 1) % SEQ_LEN).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert float(model.get_input_embeddings().weight.grad[0].norm()) > 0


def test_roberta_has_two_positions_fewer_than_rows() -> None:
    """Its first position is behind the padding token's number; one beyond the table is an assertion on the GPU."""
    architecture = {
        "model_type": "roberta", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 18, "pad_token_id": 1,
    }  # fmt: skip
    config = TrainerConfig(architecture=architecture, seq_len=16, global_batch=2, gpus_per_node=1)
    build(config)
    with pytest.raises(ConfigurationError, match="--seq-len is 17, and roberta has 16 positions"):
        build(dataclasses.replace(config, seq_len=17))
