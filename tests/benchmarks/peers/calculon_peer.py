"""Ask calculon (https://github.com/calculon-ai/calculon) for training steps; PYTHONPATH names its checkout.

Standard input: a JSON list of rows (peers.facts). Standard output: its version and, a row, step time and peak memory.

The calls are those of its own command ``calculon llm``: Llm.Application, Llm.Execution, System, compile, run, on its
own descriptions systems/a100_80g.json and h100_80g_nvl8.json (A100 40 GB and H200: with their memory bandwidth).
It knows tensor, pipeline and data parallelism of a plain transformer in 16 bits. Missing features get the nearest:
FSDP and ZeRO-2 are its optimizer sharding, flash attention is its attention. Memory is not asked for: the capacity
is lifted, so that runs that ran get a time. Its blocks have no embedding, output projection and loss.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

SYSTEMS = {
    "a100-40gb": "a100_80g",
    "a100-80gb": "a100_80g",
    "h100-80gb": "h100_80g_nvl8",
    "h200-141gb": "h100_80g_nvl8",
}
NODE = 8  # GPUs of one NVLink domain in both descriptions


def main() -> None:
    """Answer all rows."""
    root = Path(os.environ["PYTHONPATH"])
    systems = {name: json.loads((root / "systems" / f"{name}.json").read_text()) for name in set(SYSTEMS.values())}
    rows = [_answer(row, systems) for row in json.load(sys.stdin)]
    version = importlib.import_module("calculon").__version__
    json.dump({"version": f"calculon {version}", "rows": rows}, sys.stdout)


def _answer(row: dict[str, Any], systems: dict[str, Any]) -> dict[str, Any]:
    reason = _inexpressible(row)
    if not reason:
        try:
            seconds, peak = _run(row, systems)
            return {"step_time_s": {"defaults": seconds}, "peak_memory_gib": peak, "reason": ""}
        except (AssertionError, importlib.import_module("calculon.llm").Llm.Error) as error:
            reason = f"refused: {error}"
    return {"step_time_s": {}, "peak_memory_gib": None, "reason": reason}


def _inexpressible(row: dict[str, Any]) -> str:
    if row["architecture"] == "cnn":
        return "no convolutions"
    if row["precision"] not in ("fp16", "bf16"):
        return f"no {row['precision']} in its system descriptions"
    if row["gated"]:
        return "no gated feed-forward block"
    if row["kv_heads"] != row["heads"]:
        return "no grouped-query attention"
    if row["experts"]:
        return "no experts"
    if row["context"] > 1:
        return "no context parallelism"
    if row["gpu"] not in SYSTEMS:
        return f"no description of {row['gpu']}"
    return ""


def _run(row: dict[str, Any], systems: dict[str, Any]) -> tuple[float, float]:
    calculon = importlib.import_module("calculon")
    llm = importlib.import_module("calculon.llm")
    description = copy.deepcopy(systems[SYSTEMS[row["gpu"]]])
    description["mem1"]["GiB"] = 1e6
    if row["gpu"] in ("a100-40gb", "h200-141gb"):
        description["mem1"]["GBps"] = row["gpu_bandwidth_gb_per_s"]
    tensor, data, pipeline = row["tensor"], row["data"], row["pipeline"]
    inside = 0 if row["gpus"] <= NODE else 1
    system = calculon.System(description)
    application = llm.Llm.Application(
        {
            "hidden": row["hidden"],
            "feedforward": row["ffn"],
            "seq_size": row["seq_len"],
            "attn_heads": row["heads"],
            "attn_size": row["head_dim"],
            "num_blocks": row["layers"],
        }
    )
    execution = llm.Llm.Execution.from_json(
        {
            "num_procs": row["gpus"],
            "tensor_par": tensor,
            "pipeline_par": pipeline,
            "data_par": data,
            "tensor_par_net": 0 if tensor <= NODE else 1,
            "pipeline_par_net": inside,
            "data_par_net": inside,
            "batch_size": row["micro_batch"] * row["grad_accum"] * data,
            "microbatch_size": row["micro_batch"],
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": {"none": "none", "selective": "attn_only", "full": "full"}[row["checkpointing"]],
            "pipeline_interleaving": row["virtual_stages"] if pipeline > 1 else 1,
            "optimizer_sharding": data > 1 and row["sharding"] != "ddp",
            "tensor_par_comm_type": "rs_ag" if row["sequence_parallel"] and tensor > 1 else "ar",
            # --tp-comm-overlap and --overlap-grad-reduce, which runs of Megatron Core have (frameworks.toml).
            "tensor_par_overlap": "ring" if row["framework"] in ("megatron-core", "nemo") and tensor > 1 else "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": data > 1 and row["framework"] not in ("megatron", "megatron-deepspeed"),
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
    )
    model = llm.Llm(application, logging.getLogger("calculon"))
    model.compile(system, execution)
    model.run(system)
    return float(model.get_total_time()), float(model.get_mem_tier1_cap_req()) / 2**30


if __name__ == "__main__":
    main()
