"""Fine-tuning: adapters, 4-bit bases, frozen layers, 8-bit moments and pure bf16 in memory, time and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bootstrap.contract.fine_tuning import FineTuning
from optimizer.catalog.gpus import gpu_table
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.checkpoint import checkpoint_gib
from optimizer.performance.case import Case
from optimizer.performance.fine_tuning import trained_parameters
from optimizer.performance.operations import model_flops_per_sample
from optimizer.performance.setups import build_case, build_hardware, build_recipe, find_gpu
from optimizer.performance.types import DDP, ZERO3, Estimates, Grid
from optimizer.workload.model import ModelSpec
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import evaluate, part_s

LLAMA = resolve_model("llama-3.1-8b")
GIB = 2**30


def _setup(
    model: ModelSpec = LLAMA,
    *,
    gpus: int = 1,
    sharding: int = DDP,
    framework: str = "gpufleet",
    tuning: FineTuning | None = None,
    **recipe: Any,
) -> Case:
    h200 = find_gpu("H200", gpu_table())
    return build_case(
        model,
        build_recipe(model, seq_len=2048, framework=framework, tuning=tuning or FineTuning(), **recipe),
        build_hardware(h200, 8, None),
        Grid(nodes=1, data=gpus, micro_batch=2, checkpointing=2, sharding=sharding),
    )


def _estimate(model: ModelSpec = LLAMA, **settings: Any) -> Estimates:
    case = _setup(model, **settings)
    return evaluate(case.model, case.recipe, case.hardware, case.grid)


LORA, QLORA = FineTuning(method="lora"), FineTuning(method="qlora")


def test_adapters_of_llama_8b_are_peft_s_count() -> None:
    # "trainable params: 41,943,040 || all params: 8,072,204,288" is what peft prints for rank 16 on all seven
    # projections: 16 x 32 x (2 x 8192 + 2 x 5120 + 3 x 18432).
    assert trained_parameters(LLAMA, LORA) == 41_943_040
    assert trained_parameters(LLAMA, FineTuning(method="lora", lora_targets="attention", lora_rank=8)) == 6_815_744


def test_states_are_those_of_the_method() -> None:
    adapters, all_of_it = trained_parameters(LLAMA, LORA), LLAMA.parameters
    full, lora, qlora = _estimate(), _estimate(tuning=LORA), _estimate(tuning=QLORA)
    assert lora.memory_gib["weights"] * GIB == pytest.approx(2 * all_of_it + 4 * adapters, rel=1e-3)
    assert lora.memory_gib["optimizer_state"] * GIB == pytest.approx(8 * adapters)
    # 6.98e9 weights in NF4 with double quantisation (4.127 bits: QLoRA, section 3), tables in 16 bits.
    tables = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert qlora.memory_gib["weights"] * GIB == pytest.approx(
        (all_of_it - tables) * 4.127 / 8 + 2 * tables + 4 * adapters, rel=1e-3
    )
    assert _estimate(optimizer="adamw8bit").memory_gib["optimizer_state"] * GIB == pytest.approx(
        all_of_it * (2 + 8 / 256)
    )
    pure = _estimate(precision="pure-bf16")
    for part in ("weights", "optimizer_state"):
        assert pure.memory_gib[part] == pytest.approx(full.memory_gib[part] / 2)
    assert qlora.peak_memory_gib < lora.peak_memory_gib < pure.peak_memory_gib < full.peak_memory_gib


def test_frozen_weights_have_no_products_for_their_gradients() -> None:
    full, lora, frozen = (_setup(tuning=tuning) for tuning in (None, LORA, FineTuning(frozen="16")))
    assert float(model_flops_per_sample(lora)) == pytest.approx(float(model_flops_per_sample(full)) * 2 / 3, rel=0.02)
    # Half of the layers run forward only.
    assert part_s(frozen, "attention") / part_s(full, "attention") == pytest.approx((1 + 2.5 / 2) / 3.5)
    assert _estimate(tuning=LORA).step_time_s < _estimate().step_time_s < _estimate(tuning=QLORA).step_time_s * 1.5
    assert _estimate(tuning=LORA).step_time_s < _estimate(tuning=QLORA).step_time_s


def test_ranks_reduce_the_adapters_gradients_and_gather_the_whole_base() -> None:
    ddp, sharded = _estimate(gpus=8, tuning=LORA), _estimate(gpus=8, tuning=LORA, sharding=ZERO3)
    full = _estimate(gpus=8, sharding=ZERO3)
    assert ddp.time_s["data_communication"] < 0.05 * full.time_s["data_communication"] + 0.002
    assert sharded.time_s["data_communication"] > ddp.time_s["data_communication"]
    assert sharded.memory_gib["weights"] < ddp.memory_gib["weights"]
    assert np.all(sharded.peak_memory_gib < full.peak_memory_gib)


def test_a_checkpoint_holds_what_trains() -> None:
    trained = trained_parameters(LLAMA, LORA)
    assert checkpoint_gib(trained, "adamw") * GIB == pytest.approx(12 * trained)
    assert checkpoint_gib(trained, "adamw", pure=True) * GIB == pytest.approx(6 * trained)
    half = trained_parameters(LLAMA, FineTuning(frozen="16"))
    assert half == pytest.approx(16 * LLAMA.layer_parameters + LLAMA.vocab_size * LLAMA.hidden_size, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": "megatron-core", "tuning": LORA}, "limit: framework torch or gpufleet"),
        ({"tuning": FineTuning(frozen="32")}, "at most 31: llama-3.1-8b has 32 layers"),
        ({"tuning": FineTuning(method="lora", frozen="4")}, "frozen is 4, and method lora"),
        ({"tuning": FineTuning(lora_rank=64)}, "lora_rank is 64, and method full"),
        ({"tuning": QLORA, "precision": "fp32"}, "method is qlora, and precision fp32"),
    ],
)
def test_refusals_name_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build_recipe(LLAMA, **{"seq_len": 2048, "framework": "torch", **changes})


def test_a_mixture_and_a_cnn_have_no_adapters() -> None:
    for name, kind in (("mixtral-8x7b", "a mixture of experts"), ("resnet50", "no transformer")):
        with pytest.raises(InvalidInputError, match=kind):
            build_recipe(resolve_model(name), seq_len=None, framework="torch", tuning=LORA)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_attention_of_a_mixture_has_adapters_over_a_16_bit_base(name: str) -> None:
    mixture, attention = resolve_model(name), FineTuning(method="lora", lora_targets="attention")
    weights = _estimate(mixture, framework="torch", tuning=attention).memory_gib["weights"]
    assert weights == pytest.approx(2 * mixture.parameters / GIB, rel=0.02)
    query, kv = (heads * mixture.head_dim for heads in (mixture.attention_heads, mixture.kv_heads))
    sides = 2 * (mixture.hidden_size + query) + 2 * (mixture.hidden_size + kv)
    assert trained_parameters(mixture, attention) == mixture.layers * 16 * sides
    with pytest.raises(InvalidInputError, match="--method lora --lora-targets attention"):
        build_recipe(mixture, seq_len=2048, framework="torch", tuning=QLORA)


def test_tensor_ranks_have_no_adapters() -> None:
    setup = _setup(tuning=LORA)
    with pytest.raises(InvalidInputError, match="tensor is 2"):
        build_case(setup.model, setup.recipe, setup.hardware, Grid(nodes=1, data=1, tensor=2, sharding=DDP))
