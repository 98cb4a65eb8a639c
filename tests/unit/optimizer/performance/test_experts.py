"""Costs of a mixture of experts, against measured runs, its definitions and one layer measured alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.case import Case
from optimizer.performance.confidence import DENSE, MIXTURE, speed_source
from optimizer.performance.kernels import GROUPED_SLOWER
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors
from optimizer.performance.operations import operations
from optimizer.performance.types import DDP, ZERO1, ZERO3, Recipe
from optimizer.workload.model import ModelSpec
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import CALIBRATION, case_of, kept, node, row_of
from tools.calibration import predict, read_runs

MIXTRAL = resolve_model("mixtral-8x7b")
GROUPED = Recipe(seq_len=4096)


def case(model: ModelSpec = MIXTRAL, recipe: Recipe = GROUPED, **grid: Any) -> Case:
    return case_of(model, recipe, **({"sharding": ZERO3, "micro_batch": 1} | grid))


def measured() -> list[MeasuredRun]:
    return [row for row in read_runs(RUNS, gpu_table()) if row.setup.model.experts]


def test_measured_mixtures_are_met_and_the_stated_error_covers_them() -> None:
    rows = measured()
    errors = log_errors(rows, CALIBRATION)
    assert np.abs(errors).mean() < 0.08
    assert len(rows) == 13
    assert CALIBRATION.residuals[MIXTURE].relative_error > float(np.sqrt(np.mean(errors**2)))


def test_peaks_of_measured_mixtures_are_met() -> None:
    """Experts in 32 bits keep more than in 16.

    Spread over ranks, a quarter more tokens are allowed for than a rank's mean; untrained routers sent 1 to 8% more.
    """
    rows = measured()
    ratio = predict(rows, CALIBRATION).peak_memory_gib / [row.peak_memory_gib for row in rows]
    spread = np.array([np.max(row.setup.grid.expert) > 1 for row in rows])
    assert list(ratio[~spread]) == pytest.approx([1.0] * int((~spread).sum()), rel=0.04)
    assert ((ratio[spread] > 0.99) & (ratio[spread] < 1.11)).all() and spread.sum() == 5


def test_biases_of_experts_move_bytes_of_their_own_in_megatrons_code() -> None:
    gpt_oss = resolve_model("gpt-oss-120b")
    megatron = replace(GROUPED, framework="nemo")

    def routed(model: ModelSpec, recipe: Recipe) -> float:
        return sum(float(op.moved) for op in operations(case(model, recipe, sharding=ZERO1)) if op.name == "routing")

    beside = routed(gpt_oss, megatron) - routed(replace(gpt_oss, mlp_bias=False), megatron)
    assert beside == 4096 * 4 * 2880 * (68 + 36)  # 4 experts of a token, both widths 2,880
    assert routed(gpt_oss, GROUPED) == routed(replace(gpt_oss, mlp_bias=False), GROUPED)


def test_a_mixture_has_the_error_of_measured_ones() -> None:
    stated, source = speed_source(CALIBRATION, MIXTRAL, GROUPED, node(), 1, ())
    assert stated == CALIBRATION.residuals[f"{MIXTURE} on H100 in torch"]
    assert (
        CALIBRATION.residuals[DENSE].relative_error
        < stated.relative_error
        < CALIBRATION.residuals[MIXTURE].relative_error
    )
    assert "62 measured runs of a mixture" in source


def product_s(x: Case) -> float:
    """Seconds of the experts' products at their peak."""
    row = row_of(x, "experts")
    return float(row.count * row.flops / row.flop_per_s)


# FLOPs that a token's two experts compute in three passes.
FLOPS = 3 * 2 * 4096 * 2 * MIXTRAL.layers * MIXTRAL.expert_matrix_parameters


def test_grouped_experts_under_autocast_run_in_32_bits_and_sharded_ones_do_not() -> None:
    """H100: 67 TFLOP/s against 989."""
    narrow, wide = (product_s(case(sharding=sharding)) for sharding in (ZERO3, DDP))
    assert wide == pytest.approx(FLOPS / 67e12, rel=0.1)
    assert narrow == pytest.approx(FLOPS / 989e12 * GROUPED_SLOWER, rel=0.1)
    sides = [float(row_of(case(sharding=sharding), "experts").moved) for sharding in (ZERO3, DDP)]
    assert sides[1] == 2 * sides[0]
    # Code with 16-bit weights of its own is never under autocast.
    recipe = replace(GROUPED, framework="megatron-core")
    assert product_s(case(recipe=recipe, sharding=ZERO1)) == pytest.approx(product_s(case(recipe=recipe)))


def test_many_experts_of_few_tokens_fill_their_tiles_badly() -> None:
    """Half a tile of 128 rows an expert, with 128 rows each half as much again; and grouped, at 0.8 of the speed."""
    for experts in (8, 64):
        each = 4096 * 2 / experts
        expected = FLOPS / 989.4e12 * GROUPED_SLOWER * (1 + 64 / each)
        assert product_s(case(replace(MIXTRAL, experts=experts))) == pytest.approx(expected, rel=1e-3)


def test_experts_stay_in_16_bits_where_plain_pytorch_computes_in_8() -> None:
    """torchao casts linear layers, which transformers' experts are not: their products and weights are as in bf16."""
    narrow, eight = (case(recipe=replace(GROUPED, precision=precision)) for precision in ("bf16", "fp8"))
    assert product_s(eight) == product_s(narrow)
    wider = replace(MIXTRAL, ffn_size=2 * MIXTRAL.ffn_size, parameters=2 * MIXTRAL.parameters)
    more = case(wider, recipe=eight.recipe)
    casts = [float(row_of(x, "casts to 8 bits").moved) for x in (more, eight)]
    assert casts[0] == casts[1] > 0


@pytest.mark.parametrize(("framework", "share"), [("megatron", 0.5), ("nanotron", 1.0)])
def test_only_megatron_keeps_the_rows_of_experts_in_8_bits(framework: str, share: float) -> None:
    narrow, eight = (
        kept(case(recipe=Recipe(seq_len=4096, framework=framework, precision=precision)), "routing")
        for precision in ("bf16", "fp8")
    )
    assert eight == pytest.approx(narrow * (1 + share) / 2)


def test_megatron_keeps_the_activation_of_an_expert_without_a_gate_beside_its_product_with_the_probability() -> None:
    plain = replace(MIXTRAL, gated_mlp=False)
    recipe = Recipe(seq_len=4096, framework="megatron")
    both, one_of_them = (
        kept(case(plain, recipe=each), "experts") for each in (recipe, replace(recipe, framework="megatron-deepspeed"))
    )
    assert both == 1.5 * one_of_them  # input, activation, product


def test_the_fullest_rank_of_experts_is_waited_for() -> None:
    """Rows of a quarter more than the mean, and the tiles of one expert instead of eight."""
    recipe = replace(GROUPED, framework="megatron-core")
    alone, spread = (product_s(case(recipe=recipe, sharding=ZERO1, expert=expert)) for expert in (1, 8))
    assert spread / alone == pytest.approx((1.25 * 8192 + 64) / (8192 + 8 * 64))
