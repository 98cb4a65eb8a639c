"""Models, hardware and a calibration the performance tests share."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance import calibration
from optimizer.performance.calibration import Calibration, Coefficients
from optimizer.performance.case import Case
from optimizer.performance.collectives import collectives
from optimizer.performance.frameworks import CNN_DEFAULT, DEFAULT, TRAINER, frameworks
from optimizer.performance.operations import Operation, operations
from optimizer.performance.table import StepTable, estimate_case
from optimizer.performance.types import Estimates, Grid, Hardware, Recipe
from optimizer.workload.model import ModelSpec
from optimizer.workload.resolve import resolve_model

CALIBRATION = calibration.load()
LLAMA_8B = resolve_model("llama-3.1-8b")
BERT = resolve_model("bert-large")
RESNET = resolve_model("resnet50")
GPT2_XL = resolve_model("gpt2-xl")


def node(gpu: str = "h100-80gb", **changes: Any) -> Hardware:
    """Eight GPUs of one kind with NVLink and 3,200 Gbit/s of EFA."""
    facts: dict[str, Any] = {
        "gpu": gpu_table()[gpu],
        "gpus_per_node": 8,
        "interconnect": "nvswitch" if gpu_table()[gpu].nvlink_gb_per_s else "pcie",
        "network_gbit_per_s": 3200.0,
        "efa": True,
        "gpudirect": changes.get("efa", True),
    }
    return Hardware(**(facts | changes))


def evaluate(
    model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid, fitted: Calibration = CALIBRATION
) -> Estimates:
    """Estimates of every configuration of ``grid``."""
    return estimate_case(Case(model, recipe, hardware, grid), fitted.coefficients(hardware.gpu, recipe))


def of(
    model: ModelSpec = GPT2_XL,
    *,
    gpu: str = "h100-80gb",
    hardware: Hardware | None = None,
    recipe: Recipe | None = None,
    **grid: Any,
) -> Estimates:
    """Estimates of ``model``; the grid is one node of eight data-parallel GPUs unless said otherwise."""
    defaults: dict[str, Any] = {"nodes": 1, "data": 8}
    is_cnn = model.architecture == "cnn"
    recipe = recipe or Recipe(seq_len=1 if is_cnn else 512, framework=CNN_DEFAULT if is_cnn else DEFAULT)
    return evaluate(model, recipe, hardware or node(gpu), Grid(**(defaults | grid)))


def case_of(model: ModelSpec, recipe: Recipe, *, hardware: Hardware | None = None, **grid: Any) -> Case:
    """Case of ``model`` on one H100 node; the grid is one node of eight data-parallel GPUs unless said otherwise."""
    settings: dict[str, Any] = {"nodes": 1, "data": 8}
    return Case(model, recipe, hardware or node(), Grid(**(settings | grid)))


def row_of(x: Case, name: str) -> Operation:
    """The operation of a name."""
    return next(row for row in operations(x) if row.name == name)


def kept(x: Case, name: str) -> float:
    """Bytes a token that a layer keeps for the operation of a name."""
    return float(row_of(x, name).kept)


def part_s(x: Case, part: str) -> float:
    """Seconds of one part of a micro-batch."""
    return float(StepTable(x).sums[part].seconds(coefficients_of(x)))


def coefficients_of(x: Case) -> Coefficients:
    """Fitted numbers of an H100."""
    return CALIBRATION.coefficients(gpu_table()["h100-80gb"], x.recipe)


def sent_s(x: Case, axis: str) -> tuple[float, float]:
    """Seconds that a kind of ranks communicates in a micro-batch, and once a step."""
    rows = [row for _, row in collectives(x) if row.axis == axis]
    seconds = [row.seconds(x.rates, x.local, coefficients_of(x)) for row in rows]
    micro_batch = sum(float(s * row.a_micro_batch) for s, row in zip(seconds, rows, strict=True))
    return micro_batch, sum(float(s * row.a_step) for s, row in zip(seconds, rows, strict=True))


def written_out_norms(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Estimate the reference trainer as it was until 2026-11-26: transformers' norms, autocast's 32-bit residual."""
    then = frameworks()[TRAINER].model_copy(update={"fused_norms": False, "residual_bytes": 4.0, **changes})
    monkeypatch.setitem(frameworks(), TRAINER, then)
