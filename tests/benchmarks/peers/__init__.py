"""Other public estimators, asked for the same rows in the same run.

Each runs in a process of its own, in the Python that PEERS_PYTHON names, because their requirements do not go together
with gpufleet's. None is part of this repository; README.md says how to install them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.performance.frameworks import frameworks
from optimizer.performance.measured_runs import MeasuredRun
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A public estimator.

    Attributes:
        name: as its project calls it.
        script: the file here that runs the estimator; reads facts of rows as JSON, writes one Answer a row.
        checkout: the environment variable that names its checkout; empty where it is a package.
    """

    name: str
    script: str
    checkout: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A peer's estimate of one row.

    Attributes:
        step_time_s: by setting of the peer ("defaults"), seconds.
        peak_memory_gib: GiB; None where the peer does not say.
        reason: why the peer cannot express the row; then the others are empty.
    """

    step_time_s: Mapping[str, float]
    peak_memory_gib: float | None
    reason: str


LLM_ANALYSIS = Peer(name="llm-analysis", script="llm_analysis_peer.py", checkout="")
CALCULON = Peer(name="calculon", script="calculon_peer.py", checkout="CALCULON_DIR")
PEERS = (LLM_ANALYSIS, CALCULON)
PYTHON = "PEERS_PYTHON"


def ask(peer: Peer, rows: Sequence[MeasuredRun]) -> tuple[list[Answer], str]:
    """Ask a peer for all rows: answers in their order and its version, or the reason why it is not installed.

    Raises:
        RuntimeError: the peer is installed and failed.
    """
    missing = [name for name in (PYTHON, peer.checkout) if name and not os.environ.get(name)]
    if missing:
        return [], f"not installed ({' and '.join(missing)} not set): see tests/benchmarks/peers/README.md"
    asked = subprocess.run(
        [os.environ[PYTHON], str(HERE / peer.script)],
        input=json.dumps([facts(row) for row in rows]),
        env={**os.environ, "PYTHONPATH": os.environ.get(peer.checkout, "")},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise RuntimeError(f"{peer.name} failed: {asked.stderr[-2000:]}")
    answer = json.loads(asked.stdout)
    return [Answer(**row) for row in answer["rows"]], answer["version"]


def facts(row: MeasuredRun) -> dict[str, Any]:
    """Return the row's inputs in plain numbers and words, without the measurement."""
    recipe, grid, model, gpu = row.setup.recipe, row.setup.grid, row.setup.model, row.setup.hardware.gpu
    split = frameworks()[recipe.framework].splits_sequence if grid.sequence_parallel is None else grid.sequence_parallel

    def number(value: Any) -> int:
        return round(float(np.asarray(value)))

    return {
        "architecture": model.architecture,
        "layers": model.layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_size,
        "gated": model.gated_mlp,
        "heads": model.attention_heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab_size,
        "experts": model.experts,
        "experts_per_token": model.experts_per_token,
        "seq_len": recipe.seq_len,
        "precision": recipe.precision,
        "flash": recipe.attention == "flash",
        "optimizer": recipe.optimizer,
        "framework": recipe.framework,
        "gpu": gpu.key,
        "gpu_memory_gb": gpu.memory_gib,
        "gpu_bandwidth_gb_per_s": gpu.memory_bandwidth_gb_per_s,
        "gpu_nvlink_gb_per_s": gpu.nvlink_gb_per_s,
        "gpu_bf16_tflop_per_s": gpu.peak_tflop_per_s["bf16"],
        "network_gbit_per_s": row.setup.hardware.network_gbit_per_s,
        "gpus": row.setup.gpus,
        "gpus_per_node": row.setup.hardware.gpus_per_node,
        "data": number(grid.data),
        "tensor": number(grid.tensor),
        "pipeline": number(grid.pipeline),
        "context": number(grid.context),
        "virtual_stages": number(grid.virtual_stages),
        "sequence_parallel": bool(number(split)),
        "sharding": SHARDINGS[number(grid.sharding)],
        "checkpointing": CHECKPOINTINGS[number(grid.checkpointing)],
        "micro_batch": number(grid.micro_batch),
        "grad_accum": number(grid.grad_accum),
    }
