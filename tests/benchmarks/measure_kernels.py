"""Measure which kernels a training step runs: ``python -m tests.benchmarks.measure_kernels OUT.csv [--seconds S]``.

Needs CUDA, transformers and torchvision. The models and steps of measure_steps, after 12 steps to warm up; the
profiler's kernels of one step. A row a kernel: seconds and calls of one step, of the most costly of each
configuration, and a row of each kind's sum (KINDS). OUT with ``_attention`` in its name has
scaled_dot_product_attention alone, with and without a causal mask and dropout.
"""

from __future__ import annotations

import argparse
import collections
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measure_steps import Configuration, clear, cnn, kernels_of, llm, log, prepare

COLUMNS = (
    "model", "seq_len", "micro_batch", "checkpointing", "precision", "compiled", "step_s", "kernel", "calls", "seconds",
)  # fmt: skip
ATTENTION_COLUMNS = ("batch", "heads", "seq_len", "head_dim", "causal", "dropout", "forward_s", "backward_s")
MOST = 45  # kernels of a configuration
# Kind by a part of the kernel's name; the first that fits counts, "other" for the rest.
KINDS = {
    "attention": ("sdpa_sm90", "fmha", "flash", "cudnn::fusion"),
    "product": ("nvjet", "gemm", "cutlass", "cublas", "xmma", "dgrad", "wgrad", "fprop"),
    "optimizer": ("adam", "multi_tensor"),
    "compiled": ("triton_",),
    "memory": ("Memcpy", "Memset"),
}
CONFIGURATIONS: list[Configuration] = [
    llm("bert-base", 512, 32, compiled=True), llm("bert-base", 512, 32), llm("bert-large", 512, 32, compiled=True),
    llm("bert-base", 128, 32, compiled=True), llm("gpt2", 1024, 32, compiled=True), llm("gpt2", 1024, 32),
    llm("gpt2-medium", 1024, 16), llm("bert-large", 512, 32), llm("llama-410m", 2048, 8), llm("llama-1b", 2048, 4),
    llm("llama-3b", 2048, 2), llm("llama-410m", 8192, 2), llm("llama-1b", 16384, 1), llm("gpt2-xl", 1024, 4),
    llm("llama-1b", 2048, 2, precision="tf32"), llm("bert-base", 512, 32, precision="tf32"),
    llm("llama-410m", 2048, 8, "selective"), cnn("resnet50", 256), cnn("resnet18", 256),
    llm("llama-7b", 2048, 1, "full"), llm("mixtral-1b", 2048, 4, experts="eager"), llm("gpt2", 1024, 8),
    llm("llama-410m", 2048, 8, compiled=True), llm("llama-1b", 2048, 4, compiled=True),
    llm("llama-3b", 2048, 2, compiled=True), cnn("resnet50", 256, compiled=True),
]  # fmt: skip
# Batch, heads, sequence, head width.
ATTENTION = (
    (128, 12, 128, 64), (32, 12, 256, 64), (32, 12, 512, 64), (32, 16, 512, 64), (32, 12, 1024, 64), (16, 16, 1024, 64),
    (16, 12, 1024, 128), (8, 16, 2048, 64), (4, 32, 2048, 64), (8, 16, 2048, 128), (4, 16, 4096, 64),
    (2, 24, 8192, 128),
)  # fmt: skip


def kind_of(kernel: str) -> str:
    """Name the kind of a kernel."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part.lower() in name for part in parts)), "other")


def measure(run: Configuration, device: str, scale: int) -> list[dict[str, object]]:
    """Measure the rows of one configuration."""
    torch.manual_seed(0)
    step, _ = prepare(run, device, scale)
    times: list[float] = []
    for _ in range(12 if scale == 1 else 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    kernels = kernels_of(step)
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, _, taken in kernels:
        kinds[kind_of(name)] += taken
    step_s = statistics.median(times[len(times) // 3 :])
    common: dict[str, object] = {
        "model": run.model, "seq_len": run.seq_len, "micro_batch": run.micro_batch, "checkpointing": run.checkpointing,
        "precision": run.precision, "compiled": int(run.compiled), "step_s": f"{step_s:.5g}",
    }  # fmt: skip
    log(f"{run}: {step_s * 1e3:.1f} ms, " + ", ".join(f"{kind} {taken * 1e3:.1f}" for kind, taken in kinds.items()))
    sums = [{"kernel": f"all: {kind}", "calls": "", "seconds": f"{taken:.5g}"} for kind, taken in kinds.items()]
    most = [{"kernel": name[:100], "calls": calls, "seconds": f"{taken:.5g}"} for name, calls, taken in kernels[:MOST]]
    return [common | row for row in sums + most]


def attention(shape: tuple[int, int, int, int], causal: bool, dropout: float, device: str) -> dict[str, object]:
    """Measure attention alone: mean of eight calls after two."""
    batch, heads, seq_len, head_dim = shape if device == "cuda" else (1, 2, 16, 8)
    q, k, v = (
        torch.randn(batch, heads, seq_len, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)

    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    kernels: list[float] = []
    for call in (forward, backward):
        for repetitions in (2, 8):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repetitions):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
        kernels.append((time.perf_counter() - start) / repetitions)
    values = (batch, heads, seq_len, head_dim, int(causal), dropout, f"{kernels[0]:.4e}", f"{kernels[1]:.4e}")
    return dict(zip(ATTENTION_COLUMNS, values, strict=True))


def main() -> None:
    """Measure everything, as far as the time goes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no configuration after so many")
    parser.add_argument("--tiny", action="store_true", help="on the CPU at toy sizes, two configurations")
    options = parser.parse_args()
    device, started = ("cpu" if options.tiny else "cuda"), time.perf_counter()
    path = options.out.with_name(f"{options.out.stem}_attention.csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=ATTENTION_COLUMNS, lineterminator="\n")
        table.writeheader()
        for shape in ATTENTION[: 1 if options.tiny else None]:
            table.writerows(attention(shape, causal, p, device) for causal in (True, False) for p in (0.0, 0.1))
    with options.out.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        table.writeheader()
        for run in CONFIGURATIONS[:2] if options.tiny else CONFIGURATIONS:
            if time.perf_counter() - started > options.seconds:
                break
            table.writerows(measure(run, device, 16 if options.tiny else 1))
            file.flush()
            clear()


if __name__ == "__main__":
    main()
