"""Ask llm-analysis (https://github.com/cli99/llm-analysis) for training steps; runs where that is installed.

Standard input: a JSON list of rows (peers.facts). Standard output: its version and, a row, step time and peak memory.

The call is ``LLMAnalysis.training``, its API for one configuration. Two settings: "defaults" (flops_efficiency 1, which
its README calls a lower bound of latency) and "recommended" (flops_efficiency 0.5 and memory efficiency 0.9, "if one
has to make assumptions", README 0.2.2, How to Set FLOPS and Memory Efficiency). Batch size, accumulation and global
batch are all given, so that its own judgement of what fits does not refuse runs that ran.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from importlib.metadata import version
from typing import Any

# llm-analysis's names of GPUs; others are described from the datasheet's figures that the row carries.
GPUS = {"a100-40gb": "a100-sxm-40gb", "a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm-80gb"}
SETTINGS = {"defaults": {}, "recommended": {"flops_efficiency": 0.5, "hbm_memory_efficiency": 0.9}}


def main() -> None:
    """Answer all rows."""
    logging.disable(logging.CRITICAL)
    rows = [_answer(row) for row in json.load(sys.stdin)]
    json.dump({"version": f"llm-analysis {version('llm-analysis')}", "rows": rows}, sys.stdout)


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    reason = _inexpressible(row)
    if reason:
        return {"step_time_s": {}, "peak_memory_gib": None, "reason": reason}
    times, memory = {}, None
    for name, efficiency in SETTINGS.items():
        answer = _training(row, efficiency)
        times[name] = answer["latency_per_iter"]
        memory = answer["(weight+op_state+grad+act)_memory_per_gpu"] / 2**30
    return {"step_time_s": times, "peak_memory_gib": memory, "reason": ""}


def _inexpressible(row: dict[str, Any]) -> str:
    if row["architecture"] == "cnn":
        return "no convolutions"
    if row["precision"] not in ("fp16", "bf16"):
        return "no precision above 16 bits (and none of 8 in training)"
    if row["context"] > 1:
        return "no context parallelism"
    return ""


def _training(row: dict[str, Any], efficiency: dict[str, float]) -> dict[str, Any]:
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    model = config.ModelConfig(
        name="row",
        num_layers=row["layers"],
        n_head=row["heads"],
        hidden_dim=row["hidden"],
        vocab_size=row["vocab"],
        max_seq_len=row["seq_len"],
        num_key_value_heads=row["kv_heads"],
        ffn_embed_dim=row["ffn"],
        expansion_ratio=row["ffn"] / row["hidden"],
        moe_num_experts=max(1, row["experts"]),
        moe_top_k=max(1, row["experts_per_token"]),
    )
    name = GPUS.get(row["gpu"])
    gpu = (
        config.get_gpu_config_by_name(name)
        if name
        else config.GPUConfig(
            name=row["gpu"],
            mem_per_GPU_in_GB=row["gpu_memory_gb"],
            hbm_bandwidth_in_GB_per_sec=row["gpu_bandwidth_gb_per_s"],
            intra_node_bandwidth_in_GB_per_sec=row["gpu_nvlink_gb_per_s"] / 2,
            intra_node_min_message_latency=8e-6,
            peak_fp16_TFLOPS=row["gpu_bf16_tflop_per_s"],
        )
    )
    zero = {"ddp": "NONE", "zero1": "STAGE_1", "zero2": "STAGE_2", "zero3": "STAGE_3"}[row["sharding"]]
    split = row["tensor"] if row["sequence_parallel"] else 1
    answer: dict[str, Any] = analysis.LLMAnalysis(
        model,
        gpu,
        config.DtypeConfig(),
        config.ParallelismConfig(tp_size=row["tensor"], pp_size=row["pipeline"], dp_size=row["data"], sp_size=split),
        **efficiency,
    ).training(
        batch_size_per_gpu=row["micro_batch"],
        gradient_accumulation_steps=row["grad_accum"],
        global_batch_size=row["micro_batch"] * row["grad_accum"] * row["data"],
        seq_len=row["seq_len"],
        activation_recomputation=analysis.ActivationRecomputation[row["checkpointing"].upper()],
        ds_zero=analysis.DSZeRO[zero],
        flash_attn=row["flash"],
        mlp_gated_linear_units=row["gated"],
    )
    return answer


if __name__ == "__main__":
    main()
