"""The parts of a step against what a profiler saw of it (tests/benchmarks/results/h200_kernels_202611.csv)."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.measured_runs import RUNS
from optimizer.performance.rates import cycle_per_s
from optimizer.performance.rows import Row, read_row
from optimizer.performance.table import StepTable, step_seconds
from optimizer.performance.types import DDP, FULL, ZERO1, ZERO2, ZERO3, Recipe
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import CALIBRATION, GPT2_XL, LLAMA_8B, node, of

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SETTINGS = ("model", "seq_len", "micro_batch", "checkpointing", "precision", "compiled")


def profiled() -> dict[tuple[str, ...], dict[str, float]]:
    """Seconds by kind of kernel of each profiled transformer."""
    measured: dict[tuple[str, ...], dict[str, float]] = {}
    with (RESULTS / "h200_kernels_202611.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kernel"].startswith("all: ") and not row["model"].startswith(("resnet", "mixtral")):
                kinds = measured.setdefault(tuple(row[name] for name in SETTINGS), {})
                kinds[row["kernel"].removeprefix("all: ")] = float(row["seconds"])
    return measured


def predicted(settings: tuple[str, ...]) -> dict[str, float]:
    """Seconds of the parts of such a step on one H200."""
    model, seq_len, micro_batch, checkpointing, precision, compiled = settings
    with RUNS.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["suite"] == "h200" and row["model"] == model)
    row |= {"seq_len": seq_len, "micro_batch": micro_batch, "activation_checkpointing": checkpointing}
    row |= {"precision": precision, "compiled": compiled, "gpus": "1", "grad_accum": "1", "sharding": "ddp"}
    row |= {"tensor_parallel": "1", "attention": "flash"}
    setup = read_row(Row.read(row), gpu_table())
    parts = step_seconds(StepTable(setup), setup.coefficients(CALIBRATION))
    return {part: float(np.ravel(seconds)[0]) for part, seconds in parts.items()}


@pytest.mark.parametrize("settings", profiled(), ids=" ".join)
def test_a_step_takes_its_kernels_time(settings: tuple[str, ...]) -> None:
    kinds, parts = profiled()[settings], predicted(settings)
    assert sum(parts.values()) - parts["host"] == pytest.approx(sum(kinds.values()), rel=0.2)
    if "attention" in kinds:
        assert parts["attention"] == pytest.approx(kinds["attention"], rel=0.3)
    else:  # written out: the compiler's BERT, and 32-bit grouped queries
        assert parts["attention"] > 0.1 * sum(kinds.values())


def test_dropout_costs_attention_by_the_score_as_measured() -> None:
    """2 ps forward and backward of a computed score at heads of 64 (h200_kernels_202611_attention.csv)."""
    with (RESULTS / "h200_kernels_202611_attention.csv").open(encoding="utf-8", newline="") as file:
        rows = {tuple(row[name] for name in list(row)[:6]): row for row in csv.DictReader(file)}
    shape = ("8", "16", "2048", "64", "1")
    with_dropout, without = (
        sum(float(rows[*shape, dropout][name]) for name in ("forward_s", "backward_s")) for dropout in ("0.1", "0.0")
    )
    recipe = Recipe(seq_len=2048)
    model = replace(GPT2_XL, attention_heads=16, kv_heads=16, hidden_size=1024, head_dim=64)
    layers = model.layers
    drops, keeps = (
        float(of(made, gpu="h200-141gb", data=1, micro_batch=8, recipe=recipe).time_s["attention"]) / layers
        for made in (model, replace(model, dropout=False))
    )
    overhead = CALIBRATION.overhead["torch"]
    assert (drops - keeps) / overhead == pytest.approx(with_dropout - without, rel=0.15)


def test_compiled_hugging_face_code_attends_to_all_positions_and_others_to_half() -> None:
    """Seen: Llama's attention takes 2.5 to 2.8 times as long when compiled."""
    for framework, least, most in (("torch", 2.4, 3.2), ("torchtitan", 1.0, 1.0)):
        eager, compiled = (
            float(of(LLAMA_8B, recipe=Recipe(seq_len=2048, compiled=how, framework=framework)).time_s["attention"])
            for how in (False, True)
        )
        assert least <= compiled / eager <= most


def test_accumulated_gradients_are_added_up() -> None:
    """Autograd reads both and writes the sum: 12 bytes a parameter for each further micro-batch; FSDP of its shard."""
    moved = 12 * LLAMA_8B.parameters / (0.885 * node("h200-141gb").gpu.memory_bandwidth_gb_per_s * 1e9)
    for sharding, ranks in ((DDP, 1), (ZERO1, 1), (ZERO2, 8), (ZERO3, 8)):
        one, four = (
            of(LLAMA_8B, gpu="h200-141gb", checkpointing=FULL, grad_accum=count, sharding=sharding) for count in (1, 4)
        )
        more = float(four.time_s["elementwise"]) - 4 * float(one.time_s["elementwise"])
        assert more == pytest.approx(3 * moved / ranks, rel=0.01)


def test_context_ranks_share_states_as_data_ranks_do() -> None:
    """DDP's buckets and FSDP's hooks are there with two context ranks and one data rank, too."""
    data, context = (
        {sharding: of(gpu="h200-141gb", sharding=sharding, data=d, context=c).time_s for sharding in (DDP, ZERO3)}
        for d, c in ((2, 1), (1, 2))
    )
    assert context[DDP]["optimizer"] == data[DDP]["optimizer"]
    assert context[ZERO3]["host"] > 1.5 * context[DDP]["host"]


def test_arithmetic_alone_is_slower_at_the_power_limit_of_a_hopper() -> None:
    recipe = Recipe(seq_len=4096, framework="composer-fsdp")
    dense = of(LLAMA_8B, gpu="h100-80gb", micro_batch=8, recipe=recipe).time_s
    arithmetic = float(dense["matmul"] + dense["attention"] + dense["head"])
    assert 0.02 < float(dense["throttling"]) / arithmetic < 0.19
    for gpu, how in (("a100-80gb", recipe), ("h100-80gb", replace(recipe, precision="fp32"))):
        assert of(LLAMA_8B, gpu=gpu, micro_batch=8, recipe=how).time_s["throttling"] == 0
    idle = of(LLAMA_8B, gpu="h100-80gb", micro_batch=1, recipe=Recipe(seq_len=128, framework="torch")).time_s
    assert idle["throttling"] == 0


@pytest.mark.parametrize(
    ("key", "multiprocessors", "ghz"),
    [("h100-80gb", 132, 1.98), ("a100-80gb", 108, 1.41), ("v100-16gb", 80, 1.53), ("l4-24gb", 58, 2.04)],
)
def test_cycles_are_those_of_all_multiprocessors_at_the_boost_clock(key: str, multiprocessors: int, ghz: float) -> None:
    assert cycle_per_s(gpu_table()[key]) == pytest.approx(multiprocessors * ghz * 1e9, rel=0.01)


@pytest.mark.parametrize("model", ["resnet50", "resnet18"])
def test_a_convolutional_network_takes_its_kernels_time(model: str) -> None:
    """256 images on H200: products and other kernels, of which half to three quarters wait for cycles, not memory."""
    with (RESULTS / "h200_kernels_202611.csv").open(encoding="utf-8", newline="") as file:
        own = [row for row in csv.DictReader(file) if row["model"] == model and row["kernel"].startswith("all: ")]
    measured = {row["kernel"].removeprefix("all: "): float(row["seconds"]) for row in own}
    hardware = node("h200-141gb")
    endless = replace(hardware, gpu=replace(hardware.gpu, memory_bandwidth_gb_per_s=1e9))
    step, cycles_alone = (
        of(resolve_model(model), hardware=one, sharding=DDP, micro_batch=256).time_s for one in (hardware, endless)
    )
    kernels_s = measured["product"] + measured["other"]
    assert float(step["matmul"] + step["elementwise"]) == pytest.approx(kernels_s, rel=0.1)
    assert 0.4 < float(cycles_alone["elementwise"]) / measured["other"] < 0.8
