"""A measured row for tests: Llama 3.1 8B on one p5.48xlarge."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bootstrap.contract.measured import Measured, MeasuredRow
from bootstrap.contract.node_plan import Predicted

ROW = MeasuredRow(
    run_id="0123456789ab", at=datetime(2026, 11, 22, 12, tzinfo=UTC), stack="dev", instance_type="p5.48xlarge", nodes=1,
    optimizer="adamw", versions={"torch": "2.11.0", "transformers": "5.23.0"},
    measured=Measured(
        steps=40, step_time_s=2.2, step_time_p95_s=2.3, tokens_per_second=59578.0, data_wait_share=0.01,
        peak_allocated_gib=62.0, peak_reserved_gib=66.0,
    ),
    predicted=Predicted(step_time_s=2.0, step_time_p95_s=2.5, tokens_per_second=65536.0, peak_memory_gib=61.5),
    model="llama-3.1-8b", architecture="llama", parameters=8030261248, layers=32, hidden_size=4096, ffn_size=14336,
    gated_mlp=1, attention_heads=32, kv_heads=8, head_dim=128, vocab_size=128256, seq_len=8192, gpu="H100", gpus=8,
    gpus_per_node=8, gpu_memory_gib=79.1, precision="bf16", sharding="zero3", tensor_parallel=1, pipeline_parallel=1,
    context_parallel=1, sequence_parallel=0, activation_checkpointing="full", micro_batch=2, grad_accum=1,
    framework="gpufleet", attention="flash", compiled=0, tokens_per_second_per_gpu=7447.0, peak_memory_gib=62.0,
    reserved_memory_gib=66.0,
)  # fmt: skip


def measured_row(**changes: Any) -> MeasuredRow:
    return replace(ROW, **changes)
