"""Compiled training code: every model that recommend offers it for has the losses of eager code, by one graph a layer.

Dynamo and autograd's tracing are real; no kernels are generated, which takes minutes on a CPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

from bootstrap.trainer.run import assemble, open_samples
from tests.unit.bootstrap.trainer.test_config import parse

LAYERS = 10  # more than the eight graphs of one function after which dynamo gives up
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    kind: {"model_type": kind, "pad_token_id": None, **SHAPE}
    for kind in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
} | {
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "bert": {"model_type": "bert", **SHAPE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "resnet18": {"torchvision": "resnet18"},
}  # fmt: skip


def losses_of(architecture: dict[str, Any], *flags: str) -> list[float]:
    """Losses of three steps of two micro-batches; the same samples and initial weights at each call."""
    image = "torchvision" in architecture
    config = parse(
        "--architecture", json.dumps(architecture), "--seq-len", "1" if image else "16", "--steps", "3",
        "--micro-batch", "2", "--grad-accum", "2", "--warmup-steps", "1", "--learning-rate", "0.01", *flags,
    )  # fmt: skip
    parts = assemble(config, torch.device("cpu"))
    data = open_samples(parts.config, image_size=32)
    batches = [data.batch(torch.arange(2) + 2 * number, parts.device) for number in range(2)]
    return [float(parts.stepper.step([dict(batch) for batch in batches]).loss) for _ in range(3)]


# torch's own, in its compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("traced", "one_rank")
@pytest.mark.parametrize("name", MODELS)
def test_compiled_models_have_the_losses_of_eager_ones(name: str) -> None:
    eager = losses_of(MODELS[name])
    torch._dynamo.reset()
    counters.clear()
    compiled = losses_of(MODELS[name], "--compiled")
    assert compiled[:2] == pytest.approx(eager[:2], rel=2e-3) and eager[2] < eager[0]
    # Adam's first updates are signs: where a gradient is nearly 0, its rounding turns a whole one.
    assert compiled[2] == pytest.approx(eager[2], rel=2e-2)
    assert counters["stats"]["unique_graphs"] == 3  # two of the loss, one of all layers


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
)
@pytest.mark.usefixtures("traced", "one_rank")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_layers_of_tensor_ranks_are_one_graph_whatever_they_recompute(checkpointing: str) -> None:
    """Collectives of the one rank here do nothing, so its losses mean nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    counters.clear()
    losses_of(
        MODELS["llama"], "--compiled", "--tensor-parallel", "2", "--gpus-per-node", "2", "--sequence-parallel",
        "--activation-checkpointing", checkpointing,
    )  # fmt: skip
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
