"""Models, hardware and a calibration the performance tests share."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance import calibration
from optimizer.performance.evaluate import evaluate
from optimizer.performance.frameworks import TRAINER, frameworks
from optimizer.performance.inputs import Inputs
from optimizer.performance.inputs_builder import build_inputs
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
    recipe = recipe or Recipe(seq_len=1 if model.architecture == "cnn" else 512)
    return evaluate(model, recipe, hardware or node(gpu), Grid(**(defaults | grid)), CALIBRATION)


def inputs_of(model: ModelSpec, recipe: Recipe, **grid: Any) -> Inputs:
    """Inputs of ``model`` on one H100 node; the grid is one node of eight data-parallel GPUs unless said otherwise."""
    settings: dict[str, Any] = {"nodes": 1, "data": 8}
    return build_inputs(model, recipe, node(), Grid(**(settings | grid)), CALIBRATION)


def written_out_norms(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Estimate the reference trainer as it was until 2026-11-26: transformers' norms, autocast's 32-bit residual."""
    then = frameworks()[TRAINER].model_copy(update={"fused_norms": False, "residual_bytes": 4.0, **changes})
    monkeypatch.setitem(frameworks(), TRAINER, then)
