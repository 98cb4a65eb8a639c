"""Models on the meta device, made layer by layer: the weights, ties and attention of transformers' own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import UNMASKED, blocks, build, materialise

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
