from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.hardware import Precision
from optimizer.contract.units import GIB
from optimizer.performance.rows import estimate_row
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO1, ZERO2, ZERO3, Recipe
from optimizer.workload.resolve import resolve_model
from tests.benchmarks.spot_policies import RESULTS
from tests.unit.optimizer.performance.fixtures import (
    BERT,
    CALIBRATION,
    GPT2_XL,
    LLAMA_8B,
    RESNET,
    case_of,
    kept,
    node,
    of,
    written_out_norms,
)

MODELS = [GPT2_XL, LLAMA_8B, BERT, RESNET]


def test_states_of_adam_in_mixed_precision_are_exact() -> None:
    """Autocast with fp32 weights: 4 bytes of weights, 8 of Adam's moments, 4 of gradients a parameter."""
    n = GPT2_XL.parameters
    memory = of(data=1, sharding=DDP, micro_batch=1, grad_accum=2).memory_gib
    assert memory["optimizer_state"] == pytest.approx(8 * n / GIB)
    assert memory["gradients"] == pytest.approx(4 * n / GIB)
    assert memory["weights"] == pytest.approx((4 + 2) * n / GIB)  # and autocast's 16-bit copies
    sgd = of(data=1, sharding=DDP, recipe=Recipe(seq_len=512, optimizer="sgd")).memory_gib
    assert sgd["optimizer_state"] == pytest.approx(4 * n / GIB)


def test_no_compiler_nor_width_makes_scores_and_masks_smaller_than_measured() -> None:
    """Compiled scores were measured of BERT with dropout; Mistral's mask is in each layer, whatever its kernel."""
    gemma, mistral = resolve_model("gemma-2-2b"), resolve_model("mistral-7b")
    eager, compiled = (kept(case_of(gemma, Recipe(seq_len=4096, compiled=how)), "scores") for how in (False, True))
    assert eager == compiled > 0
    narrow, wide = (
        kept(case_of(mistral, Recipe(seq_len=8192, precision=precision)), "masks of windows")
        for precision in ("bf16", "tf32")
    )
    assert wide == 2 * narrow > 0


def test_states_of_megatron_are_18_bytes_a_parameter_and_of_zero_16() -> None:
    n = GPT2_XL.parameters
    for framework, each in (("megatron", 18), ("megatron-deepspeed", 16)):
        memory = of(data=1, sharding=DDP, recipe=Recipe(seq_len=512, framework=framework)).memory_gib
        states = memory["weights"] + memory["gradients"] + memory["optimizer_state"]
        assert states == pytest.approx(each * n / GIB)


@pytest.mark.parametrize("data", [2, 8, 64])
def test_zero_divides_what_its_paper_says(data: int) -> None:
    """ZeRO, arXiv:1910.02054, figure 1: stage 1 divides the optimizer state, 2 also gradients, 3 also parameters."""
    n = GPT2_XL.parameters
    recipe = Recipe(seq_len=512, framework="megatron-deepspeed")
    memory = of(nodes=max(1, data // 8), data=data, sharding=np.arange(4), grad_accum=2, recipe=recipe).memory_gib
    np.testing.assert_allclose(memory["optimizer_state"], 12 * n / GIB / np.array([1, data, data, data]))
    np.testing.assert_allclose(memory["gradients"], 2 * n / GIB / np.array([1, 1, data, data]))
    np.testing.assert_allclose(memory["weights"][:3], 2 * n / GIB)
    assert memory["weights"][3] > 2 * n / data / GIB  # and the layers being gathered
    assert memory["weights"][3] < 2 * n / data / GIB + 0.2 * 2 * n / GIB


def test_ddp_holds_its_buckets_on_several_gpus_only() -> None:
    n = GPT2_XL.parameters
    assert of(data=1, sharding=DDP).memory_gib["communication"] == 0
    assert of(data=2, sharding=DDP).memory_gib["communication"] == pytest.approx(8 * n / GIB)


def test_full_checkpointing_keeps_the_input_of_each_layer() -> None:
    """32 layers of 4096: 4 bytes an element under autocast, 2 in FSDP; logits hide one layer's own activations."""
    tokens = 2 * 8192
    layout: dict[str, Any] = {"micro_batch": 2, "checkpointing": FULL, "recipe": Recipe(seq_len=8192)}
    autocast = of(LLAMA_8B, sharding=ZERO1, **layout).memory_gib["activations"]
    fsdp = of(LLAMA_8B, sharding=ZERO3, **layout).memory_gib["activations"]
    assert (autocast, fsdp) == pytest.approx((tokens * 32 * 4096 * 4 / GIB, tokens * 32 * 4096 * 2 / GIB))


def test_a_tensor_rank_of_plain_pytorch_keeps_casts_and_logits_whole() -> None:
    """Llama 3B over four ranks, sequence split: 62.5 GiB measured, 10 of them casts (H200, torch 2.11, 2026-11-21)."""
    three = resolve_model("llama-3.2-3b")
    layout: dict[str, Any] = {"data": 1, "tensor": 4, "sharding": DDP, "micro_batch": 8, "sequence_parallel": 1}
    plain = of(three, recipe=Recipe(seq_len=2048), **layout).memory_gib
    assert plain["logits"] == pytest.approx(8 * 2048 * three.vocab_size * 12 / GIB)
    alone = of(three, recipe=Recipe(seq_len=2048), **(layout | {"tensor": 1})).memory_gib
    casts = 8 * 2048 * three.layers * 10 * three.hidden_size * 3 / 4 / GIB
    assert plain["activations"] - alone["activations"] / 4 == pytest.approx(casts)
    megatron = of(three, recipe=Recipe(seq_len=2048, framework="megatron-core"), **layout).memory_gib
    assert megatron["logits"] == pytest.approx(8 * 2048 * three.vocab_size / 4 * 6 / GIB)


def test_nemo_keeps_16_bit_gradients_and_8_bit_weights_alone() -> None:
    """Two bytes of weights by rows and columns, two of gradients; Megatron has both beside 16-bit weights, and four."""
    nemo, default, megatron = (
        {
            precision: of(LLAMA_8B, sharding=ZERO1, recipe=Recipe(seq_len=512, framework=name, precision=precision))
            for precision in ("bf16", "fp8")
        }
        for name in ("nemo", "nemo-fp32", "megatron-core")
    )
    n = LLAMA_8B.parameters / GIB
    for estimates in nemo.values():
        assert (estimates.memory_gib["weights"], estimates.memory_gib["gradients"]) == pytest.approx((2 * n, 2 * n))
    assert default["fp8"].memory_gib["gradients"] == pytest.approx(4 * n)
    assert default["fp8"].memory_gib["weights"] == pytest.approx(2 * n)
    assert [float(each.memory_gib["weights"]) for each in megatron.values()] == pytest.approx([2 * n, 4 * n])


def test_activations_of_megatrons_layer_are_korthikantis_34_bytes() -> None:
    """Equation 1 counts 34 s b h a layer without the scores: GPT-2's 4 h feed-forward block, 16 bits, dropout."""
    tokens = 64 * 1024
    recipe = Recipe(seq_len=1024, framework="megatron")
    estimates = of(sharding=ZERO3, micro_batch=64, grad_accum=2, recipe=recipe)
    layer = (34 - 1) * tokens * GPT2_XL.hidden_size  # one mask byte less: flash attention has none for its scores
    total = estimates.memory_gib["activations"] + estimates.memory_gib["logits"]
    logits = tokens * GPT2_XL.vocab_size * 8
    assert (total * GIB - logits) / GPT2_XL.layers == pytest.approx(layer, rel=0.06)


def test_selective_is_between_full_and_none() -> None:
    checkpointing = np.array([NONE, SELECTIVE, FULL])
    none, selective, full = of(sharding=ZERO3, micro_batch=8, checkpointing=checkpointing).memory_gib["activations"]
    assert none > selective > full


def test_the_limit_leaves_room_for_context_communicators_and_fragmentation() -> None:
    """0.75 GiB of CUDA, 0.69 GB a communicator, 5% of the rest."""
    recipe = Recipe(seq_len=512, framework="megatron")
    small, smaller = (replace(node(), gpu=replace(node().gpu, memory_gib=memory_gib)) for memory_gib in (20.0, 1.0))
    one = of(data=1, sharding=DDP, recipe=recipe, hardware=small)
    assert one.limit_gib == pytest.approx((20 - 0.75) / 1.05)
    three = of(data=2, tensor=2, pipeline=2, sharding=DDP, recipe=recipe, hardware=small)
    assert three.limit_gib == pytest.approx((20 - 0.75 - 3 * 0.69e9 / GIB) / 1.05)
    assert of(hardware=smaller).limit_gib == 0
    # A T4 keeps 1 GiB of its 16 for error correction.
    t4 = of(data=1, sharding=DDP, recipe=Recipe(seq_len=512, precision="fp16"), gpu="t4-16gb")
    assert t4.limit_gib == pytest.approx((15 - 0.75) / 1.05)


def test_at_the_end_of_the_backward_pass_all_gradients_are_there_and_one_layers_activations() -> None:
    """Llama 7B, one sequence of 2048, full checkpointing: 100.5 GiB measured (H200, torch 2.11, 2026-11-21)."""
    seven = resolve_model("llama-2-7b")
    estimates = of(seven, data=1, gpu="h200-141gb", sharding=DDP, checkpointing=FULL, recipe=Recipe(seq_len=2048))
    n = seven.parameters
    assert estimates.memory_gib["gradients"] == pytest.approx(4 * n / GIB)
    assert estimates.memory_gib["weights"] == pytest.approx(4 * n / GIB)
    assert estimates.memory_gib["logits"] == 0
    assert 0 < estimates.memory_gib["activations"] < 0.5
    assert estimates.peak_memory_gib == pytest.approx(100.5, rel=0.01)


def test_fsdp2_peaks_in_the_backward_pass_where_layers_and_tables_are_large() -> None:
    """Llama 8B over two H200: 64.785 GiB measured for both (torch 2.11, 2026-11-21), the root's reduction."""
    layout: dict[str, Any] = {"data": 2, "sharding": ZERO3, "gpu": "h200-141gb", "recipe": Recipe(seq_len=2048)}
    none = of(LLAMA_8B, **layout)
    full = of(LLAMA_8B, micro_batch=2, checkpointing=FULL, **layout)
    assert none.peak_memory_gib == full.peak_memory_gib == pytest.approx(64.785, rel=0.002)
    n, table = LLAMA_8B.parameters, LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    # All gradients in halves, the root's two tables whole in 32 bits, and one of their gradients in 16.
    assert none.memory_gib["gradients"] == pytest.approx((4 * n / 2 + 4 * 2 * table + 2 * table) / GIB, rel=0.001)
    assert none.memory_gib["weights"] == pytest.approx(4 * n / 2 / GIB, rel=0.001)
    # Accumulated gradients are there from the loss on; one more output of the reduction stands beside them.
    again = of(LLAMA_8B, grad_accum=4, checkpointing=FULL, **layout).memory_gib
    assert again["gradients"] - none.memory_gib["gradients"] == pytest.approx(4 * 2 * table / 2 / GIB, rel=0.01)


def test_the_trainers_zero2_keeps_parameters_gathered_between_micro_batches() -> None:
    """All 16-bit parameters beside the embedding's reduction, which is the peak of short sequences."""
    recipe = Recipe(seq_len=512, framework="gpufleet")
    memory = of(LLAMA_8B, recipe=recipe, sharding=ZERO2, grad_accum=4, checkpointing=FULL).memory_gib
    n, table = LLAMA_8B.parameters, LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert memory["weights"] == pytest.approx((4 * n / 8 + 2 * n) / GIB, rel=0.001)
    # Accumulated shards, the reduction's input and output in 32 bits, and the gradient that is still referenced.
    assert memory["gradients"] == pytest.approx((4 * n / 8 + 4 * table + 4 * table / 8 + 2 * table) / GIB, rel=0.001)


def test_a_compiler_recomputes_the_gate_and_fuses_the_loss() -> None:
    """Llama 3.2 1B at 4 sequences of 2048: 36.1 GiB compiled, 45.3 predicted eager (H200, torch 2.11, 2026-11-21)."""
    one = resolve_model("llama-3.2-1b")
    recipe = Recipe(seq_len=2048)
    eager = of(one, data=1, sharding=DDP, micro_batch=4, recipe=recipe).memory_gib
    compiled = of(one, data=1, sharding=DDP, micro_batch=4, recipe=replace(recipe, compiled=True)).memory_gib
    assert compiled["logits"] == pytest.approx(eager["logits"] / 2)
    tokens, h, kv = 4 * 2048, one.hidden_size, one.kv_heads * one.head_dim
    # Less: the normalised input of two norms, queries and keys before rotation (32 bits), one product of the gate (16).
    less = 4 * (2 * h + h + kv) + 2 * one.ffn_size
    assert eager["activations"] - compiled["activations"] == pytest.approx(tokens * one.layers * less / GIB)


def test_gpt2s_own_gelu_saves_12_bytes_an_element_in_eager_pytorch_only() -> None:
    tokens = 8 * 1024
    activations = {
        (framework, compiled): of(
            data=1, sharding=DDP, micro_batch=8, recipe=Recipe(seq_len=1024, framework=framework, compiled=compiled)
        ).memory_gib["activations"]
        for framework in ("torch", "torchtitan")
        for compiled in (False, True)
    }
    extra = tokens * GPT2_XL.layers * 12 * GPT2_XL.ffn_size / GIB
    assert activations["torch", False] - activations["torch", True] == pytest.approx(extra)
    assert activations["torchtitan", False] == activations["torchtitan", True]


@pytest.mark.parametrize(("framework", "precision", "each"), [("torch", "bf16", 7), ("megatron", "fp16", 5)])
def test_bytes_of_an_unfused_score(framework: str, precision: Precision, each: int) -> None:
    """Autocast's softmax is in 32 bits, its copy in 16, dropout has a mask; 7.1 measured (GPT-2, H200, 2026-11-21)."""
    recipe = Recipe(seq_len=1024, framework=framework, precision=precision)
    layout: dict[str, Any] = {"data": 1, "sharding": DDP, "micro_batch": 4, "grad_accum": 2}
    unfused = of(recipe=replace(recipe, attention="unfused"), **layout).memory_gib["activations"]
    scores = 4 * 1024 * 1024 * GPT2_XL.attention_heads * GPT2_XL.layers
    assert unfused - of(recipe=recipe, **layout).memory_gib["activations"] == pytest.approx(
        each * scores / GIB, rel=1e-6
    )


def test_32_bit_attention_of_grouped_heads_is_not_fused_in_pytorch() -> None:
    one = resolve_model("llama-3.2-1b")
    grouped, alone = (
        of(model, data=1, sharding=DDP, recipe=Recipe(seq_len=2048, precision="tf32")).memory_gib["activations"]
        for model in (one, replace(one, kv_heads=one.attention_heads))
    )
    scores = 2048 * 2048 * one.attention_heads * one.layers
    keys_and_values = 2048 * 2 * (one.attention_heads - one.kv_heads) * one.head_dim * 4 * one.layers
    assert grouped + keys_and_values / GIB - alone == pytest.approx(4 * scores / GIB, rel=0.01)


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    """Korthikanti et al., arXiv:2205.05198, equation 4: with it, all of a layer's activations divide by t."""
    recipe = Recipe(seq_len=1024, framework="megatron")
    layout: dict[str, Any] = {"nodes": 1, "data": 1, "sharding": DDP, "micro_batch": 64, "grad_accum": 2}
    one = of(recipe=recipe, **layout).memory_gib
    whole = of(recipe=recipe, tensor=8, **layout).memory_gib
    split = of(recipe=recipe, tensor=8, sequence_parallel=1, **layout).memory_gib
    assert split["activations"] == pytest.approx(one["activations"] / 8, rel=0.01)
    assert whole["activations"] > 1.5 * split["activations"]


grids = {
    "model": st.sampled_from(MODELS),
    "gpu": st.sampled_from(["t4-16gb", "a100-80gb", "h200-141gb"]),
    "nodes": st.integers(1, 16),
    "sharding": st.integers(0, 3),
    "micro_batch": st.integers(1, 64),
    "grad_accum": st.integers(1, 16),
    "checkpointing": st.integers(0, 2),
    "precision": st.sampled_from(["fp16", "fp32"]),
    "framework": st.sampled_from(["torch", "megatron", "composer-fsdp"]),
}


def any_recipe(model: object, precision: str, framework: str) -> Recipe:
    return Recipe(seq_len=1 if model is RESNET else 256, precision=precision, framework=framework)  # type: ignore[arg-type]


@given(**grids)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_fits_means_below_the_limit(model, gpu, nodes, precision, framework, **grid) -> None:  # type: ignore[no-untyped-def]
    estimates = of(model, gpu=gpu, nodes=nodes, data=8 * nodes, recipe=any_recipe(model, precision, framework), **grid)
    assert sum(estimates.memory_gib.values()) == pytest.approx(float(estimates.peak_memory_gib))
    assert all(part >= 0 for part in estimates.memory_gib.values())
    memory_gib = node(gpu).gpu.visible_memory_gib
    needed_gib = float(estimates.peak_memory_gib) + sum(map(float, estimates.reserve_gib.values()))
    assert bool(estimates.fits) == bool(estimates.peak_memory_gib <= estimates.limit_gib)
    assert bool(estimates.fits) == bool(needed_gib <= memory_gib * (1 + 1e-12))
    assert estimates.limit_gib < memory_gib


@given(**grids)
@settings(max_examples=60, deadline=None)
def test_a_larger_micro_batch_never_takes_less_memory(  # type: ignore[no-untyped-def]
    model, gpu, nodes, precision, framework, micro_batch, **grid
) -> None:
    sizes = np.array([micro_batch, micro_batch + 1, 2 * micro_batch])
    recipe = any_recipe(model, precision, framework)
    estimates = of(model, gpu=gpu, nodes=nodes, data=8 * nodes, recipe=recipe, micro_batch=sizes, **grid)
    assert (np.diff(estimates.peak_memory_gib) >= -1e-9).all()


@given(**grids)
@settings(max_examples=60, deadline=None)
def test_recomputing_more_never_takes_more_activations(  # type: ignore[no-untyped-def]
    model, gpu, nodes, precision, framework, checkpointing, **grid
) -> None:
    recipe = any_recipe(model, precision, framework)
    estimates = of(model, gpu=gpu, nodes=nodes, data=8 * nodes, recipe=recipe, checkpointing=np.arange(3), **grid)
    peaks = estimates.memory_gib["activations"] + estimates.memory_gib["logits"]
    assert peaks[FULL] <= peaks[NONE] * 1.0 + 1e-9
    assert estimates.peak_memory_gib[FULL] <= estimates.peak_memory_gib[NONE] + 1e-9


def test_the_allocator_holds_what_only_the_stream_of_reductions_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H100 with the reference trainer, nothing fitted: reserved bytes, and 8B that ran at half its speed."""
    written_out_norms(monkeypatch)
    with (RESULTS / "trainer_2xh100_202611.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["sharding"] in ("zero2", "zero3")]
    results = [estimate_row(row, gpu_table(), CALIBRATION) for row in rows]
    for row, result in zip(rows, results, strict=True):
        # Fragmentation is in the limit.
        assert float(row["reserved_memory_gib"]) / result["predicted_p95_memory_gib"] == pytest.approx(1.0, abs=0.06)
        no_room = row["model"] == "llama-8b" and row["activation_checkpointing"] == "none"
        assert result["fits"] and result["fit"] == ("may not fit" if no_room else "fits")
    assert len(rows) == 7
