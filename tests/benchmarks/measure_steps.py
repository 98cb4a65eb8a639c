"""Measure training steps on one GPU: ``python -m tests.benchmarks.measure_steps OUT.csv`` (needs CUDA, transformers).

Prints rows in the columns of optimizer/performance/data/measured_runs.csv: Hugging Face models with fp32 weights under
bf16 autocast, fused AdamW, random tokens, the median of 8 steps after 4, peak allocated memory. Small micro-batches
show what the host costs, long sequences what attention costs.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# (layers, hidden, ffn, heads, key-value heads, vocabulary)
SHAPES = {
    "llama-410m": (24, 1024, 2816, 16, 16, 32000),
    "llama-1b": (16, 2048, 8192, 32, 8, 128256),
}
# (model, sequence, micro-batch, accumulation, activation checkpointing)
CONFIGURATIONS = [
    ("llama-410m", 256, 1, 1, "none"),
    ("llama-410m", 512, 1, 4, "none"),
    ("llama-410m", 512, 2, 1, "full"),
    ("llama-410m", 1024, 4, 2, "none"),
    ("llama-410m", 4096, 4, 1, "none"),
    ("llama-410m", 16384, 1, 1, "none"),
    ("llama-1b", 512, 1, 1, "none"),
    ("llama-1b", 2048, 4, 1, "none"),
    ("llama-1b", 8192, 1, 2, "full"),
    ("llama-1b", 8192, 2, 1, "none"),
    ("llama-1b", 32768, 1, 1, "full"),
]
WARM_UP, MEASURED = 4, 8


def build(name: str, seq_len: int, checkpointing: str) -> Any:
    """A Hugging Face Llama of one of SHAPES on the GPU, in training mode."""
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        LlamaConfig,
        LlamaForCausalLM,
    )

    layers, hidden, ffn, heads, kv_heads, vocab = SHAPES[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=seq_len, use_cache=False,
        attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).cuda().train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(name: str, seq_len: int, micro_batch: int, accumulation: int, checkpointing: str) -> dict[str, object]:
    """One row: throughput and peak memory of one configuration."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    model = build(name, seq_len, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    layers, hidden, ffn, heads, kv_heads, vocab = SHAPES[name]
    tokens = torch.randint(vocab, (accumulation, micro_batch, seq_len), device="cuda")

    def step() -> None:
        for batch in tokens:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times = []
    for index in range(WARM_UP + MEASURED):
        if index == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM_UP:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    reserved = torch.cuda.max_memory_reserved() / 2**30
    free, total = torch.cuda.mem_get_info()
    outside = (total - free - torch.cuda.memory_reserved()) / 2**30
    sys.stderr.write(
        f"{name} s{seq_len} b{micro_batch} a{accumulation} {checkpointing}: {seconds * 1e3:.1f} ms, GiB: "
        f"allocated {peak:.2f}, reserved {reserved:.2f}, outside {outside:.2f}\n"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "model": name, "architecture": "llama", "parameters": parameters, "layers": layers, "hidden_size": hidden,
        "ffn_size": ffn, "gated_mlp": 1, "attention_heads": heads, "kv_heads": kv_heads, "vocab_size": vocab,
        "seq_len": seq_len, "gpu": "h200-141gb", "gpus": 1, "gpus_per_node": 1, "precision": "bf16", "sharding": "ddp",
        "tensor_parallel": 1, "pipeline_parallel": 1, "activation_checkpointing": checkpointing,
        "micro_batch": micro_batch, "grad_accum": accumulation, "framework": "transformers", "attention": "flash",
        "compiled": 0, "tokens_per_second_per_gpu": accumulation * micro_batch * seq_len / seconds,
        "peak_memory_gib": peak, "memory_kind": "allocated",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, fused AdamW, autocast, median of "
        f"{MEASURED}: tests/benchmarks/measure_steps.py",
    }  # fmt: skip


def matmul_tflop_per_s(precision: str, size: int = 8192) -> float:
    """Rate of a square matrix product on random data, TFLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if precision == "fp8":
        left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device="cuda")

        def product() -> None:
            torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:

        def product() -> None:
            torch.mm(a, b)

    for _ in range(5):
        product()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        product()
    torch.cuda.synchronize()
    return 50 * 2 * size**3 / (time.perf_counter() - start) / 1e12


def main(out: Path) -> None:
    """Measure every configuration and write the rows."""
    for precision in ("bf16", "fp8"):
        sys.stderr.write(f"matrix product 8192, {precision}: {matmul_tflop_per_s(precision):.0f} TFLOP/s\n")
    rows = [measure(*configuration) for configuration in CONFIGURATIONS]
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
