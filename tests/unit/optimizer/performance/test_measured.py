"""The estimator against every measured run that ships with it."""

from __future__ import annotations

import csv
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.units import GIB
from optimizer.performance import kernels
from optimizer.performance.calibration import POOLED, Residual
from optimizer.performance.confidence import CONVOLUTIONAL, DENSE, ENCODER, speed_source
from optimizer.performance.measured_runs import RUNS, MeasuredRun, log_errors, throughput_error, usable_runs
from optimizer.performance.memory import LOSS_TURN_BYTES
from optimizer.performance.rows import estimate_row, read_table
from optimizer.performance.types import Estimates, Recipe
from tests.benchmarks.accuracy import within_p95
from tests.unit.optimizer.performance.fixtures import CALIBRATION, LLAMA_8B, RESNET, node, written_out_norms
from tools.calibration import LEARNED, NVIDIA, ONE_H200, PUBLIC, fit_rows, fit_shipped, learned_runs, predict, read_runs

OUT_OF_MEMORY = Path(__file__).parents[3] / "benchmarks" / "results" / "h200_steps_202611_out_of_memory.csv"

OPERATIONS = OUT_OF_MEMORY.with_name("h200_ops_202611.csv")


@functools.cache
def rows() -> list[MeasuredRun]:
    return read_runs(RUNS, gpu_table())


@functools.cache
def estimates() -> Estimates:
    return predict(rows(), CALIBRATION)


def test_every_run_that_was_measured_is_said_to_fit() -> None:
    refused = [row.row_id for row, fits in zip(rows(), estimates().fits, strict=True) if not fits]
    assert refused == []


def test_every_run_that_ran_out_of_memory_is_said_not_to_fit() -> None:
    """The limit counts on expandable segments, which bootstrap/agent sets."""
    with OUT_OF_MEMORY.open(newline="") as file:
        ran_out = [row for row in csv.DictReader(file) if "expandable_segments:True" in row["source"]]
    assert len(ran_out) >= 8
    results = [estimate_row(row, gpu_table(), CALIBRATION) for row in ran_out]
    assert [row["row_id"] for row, estimate in zip(ran_out, results, strict=True) if estimate["fits"]] == []
    assert all(estimate["error"] is None for estimate in results)


def test_each_measured_peak_is_met_within_eight_percent_in_nine_of_ten_runs_and_on_average_within_three() -> None:
    errors = np.array(
        [
            peak / row.peak_memory_gib - 1
            for row, peak in zip(rows(), estimates().peak_memory_gib, strict=True)
            if row.peak_memory_gib is not None
        ]
    )
    assert errors.size > 80
    assert np.abs(errors).mean() < 0.03
    assert np.quantile(np.abs(errors), 0.9) < 0.08
    # Few are under-estimated by more than the margin between limit and memory, 5%; over-estimated are CNNs in 32 bits
    # whose layout is channels last, and DDP whose gradients are views of its buckets.
    assert np.mean(errors < -0.05) < 0.05
    assert errors.min() > -0.08


@pytest.mark.parametrize(
    ("suite", "bound"), [("h200", 0.10), ("llmfoundry", 0.06), ("megatron", 0.05), ("vtrain", 0.12)]
)
def test_a_suite_left_out_of_the_fit_is_met(suite: str, bound: float) -> None:
    """The equations know most of a suite without any of its rows, and often without its framework."""
    own, others = ([row for row in rows() if (row.suite == suite) == inside] for inside in (True, False))
    errors = np.exp(-log_errors(own, fit_rows(others))) - 1
    assert np.abs(errors).mean() < bound
    assert abs(errors.mean()) < 0.09  # neither too fast nor too slow by habit


@pytest.mark.parametrize(("suite", "bound"), [("dgxc-gpt", 0.04), ("nemo-fp8", 0.08)])
def test_published_runs_on_many_nodes_that_only_judge_are_met(suite: str, bound: float) -> None:
    """Llama, GPT-3 and Nemotron-4 on up to 2,048 H100, in 16 and 8 bits."""
    judge = [row for row in read_runs(PUBLIC, gpu_table()) if row.suite == suite]
    errors = log_errors(judge, CALIBRATION)
    assert suite != LEARNED and len(judge) >= 16
    assert np.abs(throughput_error(errors)).mean() < bound


def test_published_runs_of_nemo_fit_the_80_gb_that_they_ran_on() -> None:
    """Before NeMo had a profile 30 of the 86 did not."""
    nemo = [row for row in read_runs(PUBLIC, gpu_table()) if row.setup.recipe.framework.startswith("nemo")]
    estimates = predict(nemo, CALIBRATION)
    assert len(nemo) == 86
    assert estimates.fits.all()


@pytest.mark.parametrize(("kind", "bound"), [("dense on Blackwell", 0.06), ("adapters", 0.09), ("mixtures", 0.14)])
def test_runs_of_nvidias_code_are_met(kind: str, bound: float) -> None:
    nvidia = [row for row in read_runs(NVIDIA, gpu_table()) if row.setup.model.architecture == "decoder"]
    own = [row for row in nvidia if _kind(row) == kind and row.suite not in ("aws", "automodel")]
    assert len(own) > 70
    assert np.abs(throughput_error(log_errors(own, CALIBRATION))).mean() < bound


def _kind(row: MeasuredRun) -> str:
    if row.setup.model.experts:
        return "mixtures"
    if row.setup.recipe.tuning.adapts:
        return "adapters"
    return "dense on Blackwell" if row.setup.hardware.gpu.architecture.startswith("Blackwell") else "dense"


def test_convolutional_networks_on_a_gpu_that_none_was_fitted_to_are_met() -> None:
    """H200's memory is 1.4 times as fast as H100's; nine runs whose GPU, not the host, sets the pace."""
    measured, _, _ = usable_runs(read_table(OUT_OF_MEMORY.with_name("h100_steps_202611.csv"))[1], gpu_table())
    by_host = ("h100-steps-00", "h100-steps-01", "h100-steps-09")  # encoders_h100_202611.md
    contiguous = "h100-steps-12"
    networks = [row for row in measured if row.setup.model.convolutional]
    networks = [row for row in networks if row.row_id not in (*by_host, contiguous)]
    errors = np.abs(throughput_error(log_errors(networks, CALIBRATION)))
    assert len(networks) == 9
    assert errors.mean() < 0.05 and errors.max() < 0.10


def test_the_shipped_calibration_is_what_its_command_gives() -> None:
    """Refitted on the shipped rows, every coefficient comes out the same: no number was edited by hand."""
    fitted = fit_shipped()
    for name, value in fitted.model_dump(exclude={"residuals", "source", "as_of"}).items():
        shipped = getattr(CALIBRATION, name)
        if isinstance(value, dict):
            assert value == pytest.approx(shipped, rel=0.02), name
        else:
            assert value == shipped, name
    for name, residual in fitted.residuals.items():
        assert residual.rows == CALIBRATION.residuals[name].rows
        assert residual.relative_error == pytest.approx(CALIBRATION.residuals[name].relative_error, rel=0.05, abs=0.003)


def operations(**wanted: str) -> list[dict[str, str]]:
    """Operations measured one by one on H200."""
    with OPERATIONS.open(newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in wanted.items())]


def test_fitted_factors_stay_near_what_single_operations_measured() -> None:
    """Products of H200, forward, 16 bits: the fitted efficiency and traffic give each one's time, cold to sustained."""
    gpu = gpu_table()["h200-141gb"]
    c = CALIBRATION.coefficients(gpu, Recipe(seq_len=1))
    products = operations(op="matmul", direction="forward", precision="bf16", mode="warm")
    products = [row for row in products if float(row["flop"]) > 1e11 and int(row["n"]) % 8 == 0]
    flops, moved, seconds = (np.array([float(row[name]) for row in products]) for name in ("flop", "bytes", "seconds"))
    byte_per_s = gpu.memory_bandwidth_gb_per_s * 1e9 * kernels.MEMORY_EFFICIENCY
    flop_per_s = gpu.peak_tflop_per_s["bf16"] * 1e12 * c.matmul_efficiency
    error = (flops / flop_per_s + kernels.PRODUCT_TRAFFIC * moved / byte_per_s) / seconds - 1
    assert len(products) > 100
    assert abs(np.median(error)) < 0.12
    assert np.percentile(np.abs(error), 90) < 0.25
    for name in ("attention_efficiency", "elementwise_traffic", "overhead"):
        assert all(0.75 < value < 1.33 for value in getattr(CALIBRATION, name).values()), name


def test_flash_attention_takes_what_its_kernels_took() -> None:
    """FlashAttention 2 and cuDNN on H200, forward and backward, by sequence, head width and mask."""
    kinds: tuple[tuple[str, kernels.FlashKernel], ...] = (("flash", "flash2"), ("cudnn", "vendor"))
    for variant, kernel in kinds:
        measured = operations(op="attention", variant=variant, precision="bf16", mode="warm")
        by_shape: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for row in measured:
            shape = tuple(row[name] for name in ("batch", "seq_len", "heads", "kv_heads", "head_dim", "causal"))
            by_shape.setdefault(shape, []).append(row)
        errors = []
        for (batch, seq_len, _, _, head_dim, causal), passes in by_shape.items():
            if len(passes) < 2 or int(batch) * int(seq_len) < 16384 or int(head_dim) not in {64, 128}:
                continue
            half = kernels.CAUSAL_HALF_LENGTH if causal == "1" else kernels.HALF_LENGTH
            share = kernels.attention_share("Hopper", kernel)
            predicted_s = sum(float(row["flop"]) for row in passes) * (1 + half / int(seq_len)) / (989.5e12 * share)
            errors.append(predicted_s / sum(float(row["seconds"]) for row in passes) - 1)
        assert len(errors) >= 3
        assert np.abs(errors).mean() < 0.10, (variant, errors)


@pytest.mark.parametrize(
    ("vocab_size", "precision", "slower"),
    [(50304, "bf16", 1.0), (50257, "bf16", 5.7), (30522, "bf16", 2.9), (50257, "tf32", 3.0), (50257, "fp32", 1.0)],
)
def test_a_vocabulary_that_does_not_align_costs_what_was_measured(
    vocab_size: int, precision: str, slower: float
) -> None:
    assert kernels.output_projection_slowdown(precision, vocab_size) == slower


def error(key: str, framework: str = "torch") -> tuple[Residual, str]:
    """Stated error of Llama 8B on one node, and its source."""
    recipe = Recipe(seq_len=512, framework=framework)
    return speed_source(CALIBRATION, LLAMA_8B, recipe, node(key), 1, ())


def test_a_gpu_without_rows_says_so_and_has_a_wider_error() -> None:
    for key in ("v100-32gb", "t4-16gb", "a10g-24gb", "l4-24gb", "l40s-48gb", "rtx-pro-6000-96gb", "b300-269gb"):
        residual, source = error(key)
        assert residual == Residual(rows=0, relative_error=CALIBRATION.residuals[POOLED].relative_error)
        assert "no measured run" in source
    for key in ("a100-80gb", "b200-179gb"):  # no run of this code, or of one suite
        assert error(key)[0] == CALIBRATION.residuals[DENSE]
    for key in ("h100-80gb", "h200-141gb"):
        assert error(key)[0] == CALIBRATION.residuals[f"{DENSE} on H100 in torch"]
    assert CALIBRATION.residuals[DENSE].relative_error < CALIBRATION.residuals[POOLED].relative_error


def test_code_that_no_measured_run_used_has_a_wider_error() -> None:
    known, unknown = (error("h100-80gb", framework=name)[0] for name in ("megatron-core", "torchtitan"))
    assert known == CALIBRATION.residuals[DENSE]
    assert unknown.relative_error == CALIBRATION.residuals[POOLED].relative_error
    recipe = Recipe(seq_len=512, framework="torchtitan")
    encoder, _ = speed_source(CALIBRATION, replace(LLAMA_8B, architecture="encoder"), recipe, node("h100-80gb"), 1, ())
    assert encoder == CALIBRATION.residuals[ENCODER]  # not the smaller one of an encoder in plain PyTorch


def test_a_users_runs_state_the_error_of_their_kind_on_their_processor() -> None:
    own = {f"{CONVOLUTIONAL} on H100 in torchvision": Residual(rows=20, relative_error=0.3)}
    other = CALIBRATION.model_copy(update={"residuals": CALIBRATION.residuals | own})
    recipe = Recipe(seq_len=1, framework="torchvision")
    for key, stated in (("h200-141gb", 0.3), ("a100-80gb", CALIBRATION.residuals[CONVOLUTIONAL].relative_error)):
        residual, source = speed_source(other, RESNET, recipe, node(key), 1, ())
        assert residual.relative_error == stated
        assert f"measured runs of a convolutional network{' on H100' if stated == 0.3 else ' (error'}" in source


def test_stated_errors_hold_for_suites_left_out_of_the_fit_and_of_the_errors() -> None:
    """19 of 20 rows of each kind are no slower than the 95th percentile that the other suites state."""
    for kind, suites in within_p95([*rows(), *learned_runs(gpu_table())]).items():
        runs, within = (sum(counts[i] for counts in suites.values()) for i in (0, 1))
        assert 0.93 <= within / runs < 0.985, kind
        assert CALIBRATION.residuals[kind].rows == runs


def test_a_kind_of_run_on_a_gpu_without_a_second_suite_has_the_error_of_transfer() -> None:
    """MLPerf 5.0 alone has BERT on B200, and another release of MLPerf one run."""
    residuals, cell = CALIBRATION.residuals, f"{ENCODER} on {{}} in megatron-core in 8 bits"
    assert cell.format("B200") not in residuals
    assert residuals[ENCODER].relative_error > 3 * residuals[cell.format("H100")].relative_error


def test_the_reference_trainers_peaks_are_met_by_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layouts on two H200 that nothing was fitted to: 0.9% off on average, at worst 3.6% low (limit: 5% room)."""
    # The trainer's loss then widened a quarter of today's logits at a time.
    written_out_norms(monkeypatch, loss_turn_elements=2**25)
    trained = read_runs(OUT_OF_MEMORY.with_name("h200_x2_trainer_202611.csv"), gpu_table())
    predicted = predict(trained, CALIBRATION)
    error = predicted.peak_memory_gib / np.array([row.peak_memory_gib for row in trained]) - 1
    assert len(trained) == 10 and predicted.fits.all()
    assert np.abs(error).mean() < 0.015 and np.abs(error).max() < 0.05


def test_the_trainers_steps_and_peaks_are_met() -> None:
    """Two H100, nothing fitted: ten layouts, eager and compiled; of the compiled ones two wait for the host."""
    trained = read_runs(OUT_OF_MEMORY.with_name("trainer_torchtitan_2xh100_202611.csv"), gpu_table())
    predicted = predict(trained, CALIBRATION)
    peaks = predicted.peak_memory_gib / np.array([row.peak_memory_gib for row in trained]) - 1
    held = predicted.p95_memory_gib >= np.array([row.peak_memory_gib for row in trained])
    times = np.abs(predicted.step_time_s / np.array([row.step_time_s for row in trained]) - 1)
    compiled = np.array([row.setup.recipe.compiled for row in trained])
    waits = np.array([row.row_id.startswith(("trainer-07", "trainer-09")) for row in trained])
    assert held.all() and np.abs(peaks).mean() < 0.02
    assert np.count_nonzero(compiled) == np.count_nonzero(~compiled) == 10
    assert times[~compiled].mean() < 0.05 and times[compiled & ~waits].mean() < 0.05


def test_peaks_of_bert_in_16_bits_are_those_of_its_casts_and_its_narrow_gradient_of_the_logits() -> None:
    """Nothing is fitted: 42 bytes a hidden element, layer and token, and 10 a logit, as traced."""
    errors = [
        peak / row.peak_memory_gib - 1
        for row, peak in zip(rows(), estimates().peak_memory_gib, strict=True)
        if row.peak_memory_gib and row.setup.model.architecture == "encoder" and row.setup.gpus == 1
        if row.setup.recipe.precision in ("bf16", "fp16")
    ]
    assert len(errors) == 13
    assert np.abs(errors).mean() < 0.015 and np.abs(errors).max() < 0.035


def test_peaks_of_fine_tuning_and_of_mixtures_are_met() -> None:
    """Nothing was fitted to them. The trainer's loss takes no 32-bit logits where it is compiled, as there."""
    tuned, mixtures = (read_runs(OUT_OF_MEMORY.with_name(path.name), gpu_table()) for path in ONE_H200)
    above = predict(tuned, CALIBRATION).peak_memory_gib - np.array([row.peak_memory_gib for row in tuned])
    assert len(tuned) == 33 and above.min() > 0
    assert np.count_nonzero(above < LOSS_TURN_BYTES * 2**27 / GIB) >= 31
    error = predict(mixtures, CALIBRATION).peak_memory_gib / np.array([row.peak_memory_gib for row in mixtures]) - 1
    assert len(mixtures) == 44
    assert np.abs(error).mean() < 0.02 and np.abs(error).max() < 0.05


def test_peaks_stay_below_the_95th_percentile_of_their_layout_and_what_ran_out_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """19 of 20 rows of each kind of layout; of fewer, all."""
    written_out_norms(monkeypatch)
    measured = [*rows(), *read_runs(OUT_OF_MEMORY.with_name("h200_x2_trainer_202611.csv"), gpu_table())]
    measured = [row for row in measured if row.peak_memory_gib is not None]
    predicted = predict(measured, CALIBRATION)
    held = predicted.p95_memory_gib >= np.array([row.peak_memory_gib for row in measured])
    kinds = np.array([_kind_of_layout(row) for row in measured])
    assert len(set(kinds)) == 7
    for kind in set(kinds):
        assert np.count_nonzero(~held[kinds == kind]) <= 0.05 * np.count_nonzero(kinds == kind), kind
    # A margin is no licence: four of five estimates at p95 are within 8% of the measured peak. test_memory.py judges
    # what the streams of FSDP2 hold beside it.
    above = (predicted.p95_memory_gib / np.array([row.peak_memory_gib for row in measured]) - 1)[
        ~np.isin(kinds, ("sharded", "context", "expert"))
    ]
    assert np.quantile(above, 0.8) < 0.08


def _kind_of_layout(row: MeasuredRun) -> str:
    grid, model = row.setup.grid, row.setup.model
    split = next((name for name in ("tensor", "context", "expert") if getattr(grid, name) > 1), None)
    if split or model.convolutional:
        return split or "convolutional"
    return "one GPU" if row.setup.gpus == 1 else "ddp" if grid.sharding == 0 else "sharded"
