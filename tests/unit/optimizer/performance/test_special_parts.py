"""Costs of parts that plain Llama lacks: windows, soft caps, sinks, head norms, latent attention, uneven mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optimizer.performance.case import Case
from optimizer.performance.memory import activation_bytes
from optimizer.performance.operations import model_flops_per_sample
from optimizer.performance.types import Recipe
from optimizer.workload.model import LatentAttention, ModelSpec, build_model
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import case_of, part_s

SEQ_LEN, HIDDEN, LAYERS = 2048, 512, 4
RECIPE = Recipe(seq_len=SEQ_LEN, precision="bf16")
EAGER = replace(RECIPE, attention="unfused")
SHAPE: dict[str, Any] = {
    "name": "small", "architecture": "decoder", "layers": LAYERS, "hidden_size": HIDDEN, "ffn_size": 1536,
    "gated_mlp": True, "attention_heads": 4, "kv_heads": 2, "head_dim": 128, "vocab_size": 1024,
    "tied_embeddings": True, "source": "test",
}  # fmt: skip
GEMMA = {"norms_per_layer": 4, "head_norms": True}


def small(**changes: Any) -> ModelSpec:
    return build_model(**(SHAPE | changes))


def saved_bytes(model: ModelSpec, recipe: Recipe) -> float:
    """Bytes that one layer keeps of a token, in elements of the hidden size."""
    return float(activation_bytes(alone(model, recipe)).saved) / (SEQ_LEN * LAYERS * HIDDEN)


def alone(model: ModelSpec, recipe: Recipe) -> Case:
    return case_of(model, recipe, data=1)


# Saved bytes a token, layer and hidden element that gpufleet profile traced with modules of transformers of SHAPE
# (torch 2.11, transformers 5.23, 16-bit autocast, 2026-11-22): model, recipe, then those of the same without the part.
@pytest.mark.parametrize(
    ("model", "without", "recipe", "traced", "traced_without"),
    [
        (small(head_norms=True), small(), RECIPE, 69.60, 60.56),  # qwen3 and llama
        (small(**GEMMA), small(head_norms=True), RECIPE, 88.62, 69.60),  # gemma3_text without windows and qwen3
        (small(**GEMMA, window=512, windowed_layers=4), small(**GEMMA), RECIPE, 98.62, 88.62),
        (small(window=512, windowed_layers=4), small(), RECIPE, 70.56, 60.56),  # mistral and llama
        (small(norms_per_layer=4), small(), EAGER, 174.54, 158.53),  # gemma2 without soft caps and llama, eager
        (small(norms_per_layer=4, soft_cap=True), small(norms_per_layer=4), EAGER, 206.54, 174.54),
    ],
    ids=["head norms", "four norms", "window of gemma", "window of mistral", "four norms, eager", "soft cap"],
)
def test_a_part_keeps_the_bytes_that_a_trace_counts(
    model: ModelSpec, without: ModelSpec, recipe: Recipe, traced: float, traced_without: float
) -> None:
    more = saved_bytes(model, recipe) - saved_bytes(without, recipe)
    # 5% of the whole layer at most: norms of 16-bit inputs keep a little less than counted.
    assert more == pytest.approx(traced - traced_without, abs=0.05 * traced)
    assert more == pytest.approx(traced - traced_without, rel=0.3)


def test_soft_caps_and_sinks_have_no_fused_attention_in_pytorch() -> None:
    for part in ({"soft_cap": True}, {"sinks": True}):
        written = alone(small(**part), RECIPE)
        assert not written.has_flash
        assert part_s(written, "attention") > part_s(alone(small(), EAGER), "attention")
        assert alone(small(**part), replace(RECIPE, framework="megatron-core")).has_flash


def test_a_window_leaves_out_scores_where_the_kernel_knows_it() -> None:
    """Tokens 0 to 511 see all before them, the others 512: 2 x 1/4 - 1/16 of the causal scores."""
    windowed, whole = small(window=512, windowed_layers=4), small()
    fused = replace(RECIPE, framework="megatron-core")
    times = [part_s(alone(model, fused), "attention") for model in (windowed, whole)]
    assert times[0] / times[1] == pytest.approx(0.4375)
    # A mask makes plain PyTorch compute both halves.
    times = [part_s(alone(model, RECIPE), "attention") for model in (windowed, whole)]
    assert times[0] > 2 * times[1]
    scores = 3 * 4 * SEQ_LEN**2 * 512 / 2 * LAYERS
    less = float(model_flops_per_sample(alone(whole, RECIPE))) - float(model_flops_per_sample(alone(windowed, RECIPE)))
    assert less == pytest.approx((1 - 0.4375) * scores)
    assert float(saved_bytes(small(window=4096, windowed_layers=4), RECIPE)) == float(saved_bytes(whole, RECIPE))


def test_latent_attention_multiplies_its_own_projections_and_keeps_whole_heads() -> None:
    latent = LatentAttention(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    model = resolve_model("deepseek-v3")
    assert model.latent_attention == latent
    # Weights of one layer's projections, as transformers builds them (modeling_deepseek_v3.py).
    shapes = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    assert model.attention_matrix_parameters == sum(rows * columns for rows, columns in shapes)
    # Scores of heads of 192 and values of 128; keys and values are as many as queries.
    x = case_of(model, RECIPE)
    assert x.query == x.kv == 128 * (192 + 128) / 2
    forward = model_flops_per_sample(x) / 3 / SEQ_LEN
    expected = 2 * (model.active_parameters - 7168 * 129280) + 61 * SEQ_LEN * 128 * (192 + 128)
    assert float(forward) == pytest.approx(expected, rel=1e-4)


def test_the_fullest_stage_of_an_uneven_mixture_has_its_expert_layers() -> None:
    model = resolve_model("deepseek-v3")
    whole = case_of(model, RECIPE, data=8, expert=1)
    assert float(whole.stage_parameters) == pytest.approx(671026404352)
    staged = case_of(model, RECIPE, data=1, pipeline=61)
    expert_layer = 256 * 3 * 7168 * 2048
    assert float(staged.stage_parameters) > expert_layer + 129280 * 7168
    assert model.dense_layer_parameters < 0.1 * expert_layer
