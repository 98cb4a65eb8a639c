"""The reach of the reference trainer: what it carries out, and the reason of each part that it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bootstrap.contract.node_plan import NodePlan
from bootstrap.contract.trainer import shardings, splits, unsupported

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
PLAN = NodePlan(architecture=LLAMA, seq_len=8192, sharding="zero3")
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}


def problems(changes: dict[str, Any]) -> list[str]:
    """Parts of PLAN that the trainer does not carry out, with changes that may be of the training code, too."""
    fields = {name: value for name, value in changes.items() if hasattr(PLAN, name)}
    others = {name: value for name, value in changes.items() if name not in fields}
    return unsupported(replace(PLAN, **fields), gpus_per_node=8, **others)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor_parallel": 8, "sharding": "zero2", "activation_checkpointing": "selective"},
        {"context_parallel": 4, "tensor_parallel": 2},
        {"architecture": {"torchvision": "resnet50"}, "sharding": "ddp", "framework": "torchvision"},
        {"architecture": {"model_type": "bert"}, "precision": "fp16"},
        {"architecture": MISTRAL, "context_parallel": 2, "seq_len": 4096},
        {"architecture": {**LLAMA, "model_type": "qwen2", "sliding_window": 4096}, "context_parallel": 2},
        {"optimizer": "adafactor", "sharding": "ddp"},
        {"sharding": "zero1", "balance": "measured"},
    ],
)
def test_the_trainer_carries_out(changes: dict[str, Any]) -> None:
    assert problems(changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": {}}, "builds a model from a config.json"),
        (
            {"architecture": LLAMA | {"model_type": "mixtral", "num_local_experts": 8}},
            "mixtral is a mixture of experts",
        ),
        ({"architecture": {"torchvision": "vgg16"}}, "model vgg16 is not one of resnet18"),
        ({"pipeline_parallel": 4}, "pipeline parallelism is 4"),
        ({"balance": "measured"}, "balance is measured, and sharding zero3 exchanges states in every micro-batch"),
        ({"balance": "best"}, "balance best is not one of none, measured"),
        ({"expert_parallel": 8}, "expert parallelism is 8"),
        ({"precision": "fp8"}, "precision fp8"),
        ({"framework": "megatron-core"}, "framework megatron-core"),
        ({"optimizer": "adafactor"}, "adafactor has no sharded form, and sharding is zero3"),
        ({"optimizer": "adafactor", "sharding": "ddp", "tensor_parallel": 2}, "no sharded form, and tensor"),
        ({"architecture": {"model_type": "gpt2"}, "tensor_parallel": 2}, "is 2, and the trainer does llama"),
        ({"tensor_parallel": 16}, "8 GPUs are no multiple"),
        ({"tensor_parallel": 16}, "does not divide the key-value heads, 8"),
        ({"architecture": MISTRAL, "context_parallel": 2}, "mistral over 8192 tokens has no full causal attention"),
        ({"architecture": {"model_type": "bert"}, "context_parallel": 2}, "bert over"),
        (
            {"architecture": {**LLAMA, "layer_types": ["sliding_attention"]}, "context_parallel": 2},
            "no full causal attention",
        ),
        ({"architecture": {"model_type": "mamba"}}, "model_type mamba is not one of gemma2"),
    ],
)
def test_a_part_beyond_it_is_named_with_its_value(changes: dict[str, Any], reason: str) -> None:
    assert reason in "; ".join(problems(changes))


def test_dimensions_and_shardings_of_a_search() -> None:
    assert splits(LLAMA, 8192, "adamw") == ("data", "tensor", "context")
    assert splits(MISTRAL, 8192, "adamw") == ("data", "tensor")
    assert splits(LLAMA, 8192, "adafactor") == ("data", "context")
    assert splits(None, 1, "adamw") == ("data",)
    assert shardings("adafactor") == ("ddp",)
