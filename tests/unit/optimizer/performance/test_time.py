from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.performance.table import StepTable, explain, step_seconds
from optimizer.performance.types import DDP, FULL, NONE, SELECTIVE, ZERO1, ZERO2, ZERO3, Grid, Recipe
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import (
    BERT,
    GPT2_XL,
    LLAMA_8B,
    RESNET,
    case_of,
    coefficients_of,
    evaluate,
    node,
    of,
)

MODELS = [GPT2_XL, LLAMA_8B, BERT, RESNET]


def test_useful_flops_are_six_a_parameter_and_token_plus_attention() -> None:
    """MFU's numerator: PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T, here with half of it for a causal mask."""
    estimates = of(LLAMA_8B, sharding=ZERO3, micro_batch=1, recipe=Recipe(seq_len=8192))
    peak = node().gpu.peak_tflop_per_s["bf16"] * 1e12 * 8
    flops = float(estimates.mfu * peak / estimates.tokens_per_second)
    m = LLAMA_8B
    matrices = m.parameters - m.vocab_size * m.hidden_size  # the input embedding is a look-up
    assert flops == pytest.approx(6 * matrices + 6 * m.layers * m.hidden_size * 8192, rel=0.001)


@pytest.mark.parametrize("model", ["resnet50", "bert-large", "vit-l-16", "whisper-tiny", "t5-small", "mixtral-8x7b"])
@pytest.mark.parametrize("sharding", [DDP, ZERO1, ZERO3])
def test_the_explained_operations_add_up_to_the_parts(model: str, sharding: int) -> None:
    x = case_of(resolve_model(model), Recipe(seq_len=512), sharding=sharding, micro_batch=2, grad_accum=4)
    parts = step_seconds(StepTable(x), coefficients_of(x))
    rows = [row for row in explain(x, coefficients_of(x)) if "ranks" not in row]
    # Copies of weights were in no row: three quarters of the element-wise seconds of a mixture under ZeRO-3.
    assert 4 * sum(row.get("s", 0.0) for row in rows) == pytest.approx(
        float(sum(parts[part] for part in ("matmul", "attention", "elementwise", "head")))
    )


def test_a_step_lasts_as_long_as_its_images_take_to_decode() -> None:
    recipe = Recipe(seq_len=1, samples_per_vcpu_s=250.0)
    alone = of(RESNET, micro_batch=256, grad_accum=2, recipe=Recipe(seq_len=1), hardware=node(loader_workers=4))
    fed, starved = (
        of(RESNET, micro_batch=256, grad_accum=2, recipe=recipe, hardware=node(loader_workers=workers))
        for workers in (100, 4)
    )
    assert float(alone.time_s["input"]) == float(fed.time_s["input"]) == 0
    assert float(fed.step_time_s) == float(alone.step_time_s)
    assert float(starved.step_time_s) == pytest.approx(2 * 256 / (250 * 4))
    assert float(starved.time_s["input"]) == pytest.approx(2 * 256 / (250 * 4) - float(alone.step_time_s))


def test_a_cnn_takes_three_times_its_published_forward_flops() -> None:
    estimates = of(RESNET, gpu="h200-141gb", sharding=DDP, micro_batch=256)
    peak = 989.5e12 * 8
    assert float(estimates.mfu * peak / estimates.tokens_per_second) == pytest.approx(3 * 2 * 4.089e9, rel=0.001)


def test_recomputation_costs_a_forward_pass_but_for_the_last_product_and_no_mfu_is_claimed_for_it() -> None:
    none = of(LLAMA_8B, nodes=2, data=16, micro_batch=4, checkpointing=NONE, recipe=Recipe(seq_len=4096))
    full = of(LLAMA_8B, nodes=2, data=16, micro_batch=4, checkpointing=FULL, recipe=Recipe(seq_len=4096))
    m = LLAMA_8B
    last = m.hidden_size * m.ffn_size / m.active_layer_matrix_parameters
    assert full.time_s["matmul"] == pytest.approx(none.time_s["matmul"] * (4 - last) / 3)
    assert full.mfu * full.step_time_s == pytest.approx(float(none.mfu * none.step_time_s))


def test_a_grid_is_the_same_as_its_configurations_one_by_one() -> None:
    rng = np.random.default_rng(7)
    size = 37
    nodes = rng.integers(1, 9, size)
    grid = Grid(
        nodes=nodes,
        data=8 * nodes,
        sharding=rng.integers(0, 4, size),
        micro_batch=rng.integers(1, 16, size),
        grad_accum=rng.integers(1, 9, size),
        checkpointing=rng.integers(0, 3, size),
    )
    recipe = Recipe(seq_len=2048)
    estimates = evaluate(LLAMA_8B, recipe, node(), grid)
    for at in (0, 1, size - 1):
        names = ("nodes", "data", "sharding", "micro_batch", "grad_accum", "checkpointing")
        alone = Grid(**{name: int(np.asarray(getattr(grid, name))[at]) for name in names})
        one = evaluate(LLAMA_8B, recipe, node(), alone)
        assert one.step_time_s.shape == ()
        assert estimates.step_time_s[at] == pytest.approx(float(one.step_time_s))
        assert estimates.peak_memory_gib[at] == pytest.approx(float(one.peak_memory_gib))
        assert estimates.fits[at] == one.fits


def test_data_parallel_communication_moves_what_the_zero_paper_says() -> None:
    """arXiv:1910.02054, section 7: stages 1 and 2 move what DDP moves, stage 3 half as much again."""
    recipe = Recipe(seq_len=64, precision="fp32", framework="composer-fsdp")  # same bytes for gradients and parameters
    hardware = node(network_gbit_per_s=1.0)  # so slow that nothing hides and latencies vanish
    seconds = of(GPT2_XL, hardware=hardware, nodes=8, data=64, sharding=np.arange(4), recipe=recipe).time_s[
        "data_communication"
    ]
    assert seconds[ZERO1] == pytest.approx(seconds[DDP], rel=0.01)
    assert seconds[ZERO2] == pytest.approx(seconds[DDP], rel=0.01)
    assert seconds[ZERO3] == pytest.approx(1.5 * seconds[DDP], rel=0.02)


def test_accumulation_saves_ddp_its_reductions_and_not_zero3() -> None:
    hardware = node(network_gbit_per_s=10.0)
    for sharding, factor in ((DDP, 1.0), (ZERO3, 8.0)):
        times = of(GPT2_XL, hardware=hardware, nodes=8, data=64, sharding=sharding, grad_accum=np.array([1, 8]))
        seconds = times.time_s["data_communication"]
        assert seconds[1] == pytest.approx(factor * seconds[0], rel=0.05)


grids = {
    "model": st.sampled_from(MODELS),
    "gpu": st.sampled_from(["v100-32gb", "l4-24gb", "a100-80gb", "h200-141gb", "b200-179gb"]),
    "nodes": st.integers(1, 64),
    "sharding": st.integers(0, 3),
    "micro_batch": st.integers(1, 64),
    "grad_accum": st.integers(1, 16),
    "checkpointing": st.sampled_from([NONE, SELECTIVE, FULL]),
}


def any_recipe(model: object) -> Recipe:
    return Recipe(seq_len=1 if model is RESNET else 256, precision="fp16")


@given(**grids)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_to_the_step_and_throughput_is_its_inverse(model, gpu, nodes, **grid) -> None:  # type: ignore[no-untyped-def]
    recipe = any_recipe(model)
    estimates = of(model, gpu=gpu, nodes=nodes, data=8 * nodes, recipe=recipe, **grid)
    assert sum(estimates.time_s.values()) == pytest.approx(float(estimates.step_time_s))
    assert all(part >= -1e-12 for part in estimates.time_s.values())
    tokens = 8 * nodes * grid["micro_batch"] * grid["grad_accum"] * recipe.seq_len
    assert estimates.tokens_per_second * estimates.step_time_s == pytest.approx(tokens)
    assert 0 < estimates.mfu < 1


@given(**grids)
@settings(max_examples=60, deadline=None)
def test_a_larger_step_is_no_shorter_and_a_larger_micro_batch_is_no_slower_a_sample(  # type: ignore[no-untyped-def]
    model, gpu, nodes, micro_batch, grad_accum, **grid
) -> None:
    grid |= {"gpu": gpu, "nodes": nodes, "data": 8 * nodes, "recipe": any_recipe(model)}
    estimates = of(model, micro_batch=micro_batch * np.array([1, 2, 4]), grad_accum=grad_accum, **grid)
    assert (np.diff(estimates.step_time_s) > -1e-12).all()  # equal where the host is the limit
    assert (np.diff(estimates.tokens_per_second) > -1e-6 * estimates.tokens_per_second[0]).all()
    more = of(model, micro_batch=micro_batch, grad_accum=np.arange(1, 5), **grid)
    assert (np.diff(more.step_time_s) > 0).all()


@given(**grids)
@settings(max_examples=40, deadline=None)
def test_a_faster_network_is_never_slower(model, gpu, nodes, **grid) -> None:  # type: ignore[no-untyped-def]
    grid |= {"nodes": nodes, "data": 8 * nodes, "recipe": any_recipe(model)}
    networks = (node(gpu, network_gbit_per_s=gbit) for gbit in (25.0, 400.0, 3200.0))
    times = [float(of(model, hardware=hardware, **grid).step_time_s) for hardware in networks]
    assert times[0] >= times[1] >= times[2]
