"""Measure training steps on one GPU: ``python -m tests.benchmarks.measure_steps OUT.csv``.

Needs CUDA, transformers and torchvision. Writes rows in the columns of optimizer/performance/data/measured_runs.csv, as
they are measured, and those that ran out of memory to OUT with ``_out_of_memory`` in its name. Hugging Face's and
torchvision's models, fp32 weights, bf16 or fp16 by autocast (fp16 with a gradient scaler), fp8 in all linear
layers but the output projection with torchao (the ``fp8`` groups need it), fused AdamW (SGD with momentum for
CNNs), random data, no clipping. A configuration runs for at least 1 s before 1.5 s are measured, so that the
GPU is hot; the median step. ``--kernels`` writes the GPU time of each kernel in a step after those, to OUT with
``_kernels``.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

# architecture, layers, hidden, ffn, heads, key-value heads, vocabulary (experts, experts a token)
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, int]] = {
    "gpt2": ("decoder", 12, 768, 3072, 12, 12, 50257, 0, 0),
    "gpt2-medium": ("decoder", 24, 1024, 4096, 16, 16, 50257, 0, 0),
    "gpt2-xl": ("decoder", 48, 1600, 6400, 25, 25, 50257, 0, 0),
    "bert-base": ("encoder", 12, 768, 3072, 12, 12, 30522, 0, 0),
    "bert-large": ("encoder", 24, 1024, 4096, 16, 16, 30522, 0, 0),
    "llama-220m": ("llama", 12, 1024, 2816, 16, 16, 32000, 0, 0),
    "llama-410m": ("llama", 24, 1024, 2816, 16, 16, 32000, 0, 0),
    "llama-410m-128k": ("llama", 24, 1024, 2816, 16, 16, 128256, 0, 0),
    "llama-410m-256k": ("llama", 24, 1024, 2816, 16, 16, 256000, 0, 0),
    "llama-1b": ("llama", 16, 2048, 8192, 32, 8, 128256, 0, 0),
    "llama-3b": ("llama", 28, 3072, 8192, 24, 8, 128256, 0, 0),
    "llama-2b-wide": ("llama", 8, 4096, 14336, 32, 8, 32000, 0, 0),
    "llama-7b": ("llama", 32, 4096, 11008, 32, 32, 32000, 0, 0),
    "llama-8b": ("llama", 32, 4096, 14336, 32, 8, 128256, 0, 0),
    "mixtral-1b": ("llama", 12, 1024, 3584, 16, 8, 32000, 8, 2),
}
CNNS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One run. ``channels_last`` is for CNNs; ``attention`` "flash" is what scaled_dot_product_attention chooses.

    ``recipe`` is torchao's, in fp8: one scale a tensor, or one a row of it.
    """

    model: str
    micro_batch: int
    seq_len: int = 0
    grad_accum: int = 1
    checkpointing: str = "none"
    precision: str = "bf16"
    compiled: bool = False
    attention: str = "flash"
    channels_last: bool = True
    experts: str = "grouped_mm"
    recipe: str = "tensorwise"

    def __str__(self) -> str:
        words = [self.model, f"s{self.seq_len}", f"b{self.micro_batch}", f"a{self.grad_accum}", self.checkpointing]
        words += [self.precision, *[self.recipe] * (self.precision == "fp8"), self.attention]
        words += ["compiled"] * self.compiled
        return " ".join(words)


def llm(model: str, seq_len: int, micro_batch: int, checkpointing: str = "none", **more: Any) -> Configuration:
    return Configuration(model=model, seq_len=seq_len, micro_batch=micro_batch, checkpointing=checkpointing, **more)


def cnn(model: str, micro_batch: int, precision: str = "bf16", **more: Any) -> Configuration:
    return Configuration(model=model, micro_batch=micro_batch, precision=precision, **more)


def in_fp8(*runs: Configuration) -> list[Configuration]:
    """Repeat each run in bf16, and in fp8 with one scale a tensor and one a row."""
    how = (("bf16", "tensorwise"), ("fp8", "tensorwise"), ("fp8", "rowwise"))
    return [replace(run, precision=precision, recipe=recipe) for run in runs for precision, recipe in how]


# The most useful first; rows of measured_runs.csv say when each was measured.
CONFIGURATIONS: dict[str, list[Configuration]] = {
    # The host is slower than the GPU.
    "small": [
        llm("gpt2", 1024, 1), llm("gpt2", 1024, 8), llm("gpt2", 1024, 32), llm("gpt2", 128, 8),
        llm("gpt2-medium", 1024, 4), llm("bert-base", 128, 2), llm("bert-base", 128, 32), llm("bert-base", 512, 32),
        llm("bert-large", 512, 4), llm("bert-large", 128, 8), llm("gpt2-xl", 1024, 4),
        llm("llama-3b", 2048, 1, grad_accum=4),
    ],
    "compiled": [
        llm("gpt2", 1024, 8, compiled=True), llm("gpt2", 1024, 32, compiled=True),
        llm("bert-base", 512, 32, compiled=True),
        llm("llama-410m", 2048, 8, compiled=True), llm("llama-410m", 512, 1, compiled=True),
        llm("llama-1b", 2048, 4, compiled=True), llm("llama-3b", 2048, 2, compiled=True),
        llm("llama-410m", 2048, 8, "full", compiled=True),
    ],
    "precision": [
        llm("bert-base", 512, 32, precision="tf32"), llm("bert-base", 128, 32, precision="fp32"),
        llm("bert-base", 512, 32, precision="fp16"), llm("llama-410m", 2048, 4, precision="tf32"),
        llm("llama-410m", 2048, 2, precision="fp32"), llm("gpt2", 1024, 8, precision="tf32"),
        llm("llama-1b", 2048, 2, precision="tf32"), llm("llama-410m", 2048, 8, precision="fp16"),
    ],
    "checkpointing": [
        llm("llama-410m", 2048, 8, "selective"), llm("llama-1b", 2048, 4, "selective"),
        llm("llama-1b", 2048, 8, "full"), llm("llama-3b", 2048, 4, "selective"), llm("bert-large", 512, 32, "full"),
        llm("gpt2-medium", 1024, 16, "full"), llm("gpt2-medium", 1024, 16, "selective"),
    ],
    "long": [
        llm("llama-410m", 32768, 1), llm("llama-410m", 65536, 1, "full"), llm("llama-1b", 16384, 1, "full"),
        llm("llama-1b", 16384, 1), llm("llama-3b", 16384, 1, "full"), llm("llama-3b", 8192, 1, "full"),
    ],
    "vocabulary": [
        llm("llama-410m-128k", 2048, 8), llm("llama-410m-256k", 2048, 4), llm("llama-410m-256k", 2048, 8, "full"),
    ],
    "unfused": [
        llm("gpt2", 1024, 8, attention="unfused"), llm("bert-large", 512, 16, attention="unfused"),
        llm("llama-410m", 2048, 4, attention="unfused"),
    ],
    "experts": [
        llm("mixtral-1b", 2048, 4), llm("mixtral-1b", 2048, 4, experts="eager"), llm("mixtral-1b", 2048, 8, "full"),
    ],
    # Close to the end of memory, and beyond.
    "memory": [
        llm("llama-7b", 2048, 1, "full"), llm("llama-7b", 2048, 3), llm("llama-8b", 2048, 1, "full"),
        llm("llama-8b", 2048, 2), llm("llama-3b", 2048, 7), llm("llama-3b", 2048, 8), llm("llama-1b", 65536, 1, "full"),
        llm("llama-1b", 4096, 8), llm("llama-1b", 4096, 9), llm("llama-410m", 2048, 36), llm("llama-410m", 2048, 40),
        llm("gpt2-xl", 1024, 32), llm("gpt2-xl", 1024, 36), llm("bert-large", 512, 200), llm("bert-large", 512, 224),
        cnn("resnet50", 3072), cnn("resnet50", 3328),
    ],
    "cnn": [
        cnn("resnet50", 32), cnn("resnet50", 64), cnn("resnet50", 512), cnn("resnet50", 1024),
        cnn("resnet50", 128, "tf32"), cnn("resnet18", 256), cnn("resnet34", 512),
        cnn("resnet101", 128), cnn("resnet101", 64, "tf32"), cnn("resnet152", 64),
        cnn("resnet101", 128, "fp32"), cnn("resnet50", 256, compiled=True),
        cnn("resnet50", 256, channels_last=False),
    ],
    "fp8": in_fp8(
        llm("llama-2b-wide", 2048, 4), llm("llama-1b", 2048, 4), llm("llama-3b", 2048, 2), llm("llama-220m", 2048, 16),
        llm("llama-2b-wide", 8192, 2), llm("llama-1b", 8192, 1), llm("llama-3b", 4096, 2, "full"),
        llm("llama-2b-wide", 2048, 1, grad_accum=4),
    ),
    "fp8-compiled": in_fp8(
        llm("llama-2b-wide", 2048, 4, compiled=True), llm("llama-1b", 2048, 4, compiled=True),
        llm("llama-3b", 2048, 2, compiled=True), llm("llama-2b-wide", 8192, 2, compiled=True),
        llm("llama-2b-wide", 4096, 4, "full", compiled=True), llm("llama-1b", 4096, 4, compiled=True),
        llm("llama-220m", 2048, 16, compiled=True),
    ),
    # One GPU with the tokens that each of two context ranks has (measure_context.py).
    "context": [llm("llama-1b", 16384, 1), llm("llama-1b", 16384, 1, "full"), llm("llama-1b", 32768, 1, "full")],
}  # fmt: skip


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a policy of selective checkpointing that keeps the outputs of matrix products and attention."""
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    kept = {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    }  # fmt: skip
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def transformer(run: Configuration, device: str, scale: int = 1) -> Any:
    """Build a Hugging Face model of one of SHAPES, in training mode; ``scale`` shrinks it."""
    transformers: Any = importlib.import_module("transformers")

    architecture, layers, hidden, ffn, heads, kv_heads, vocab, experts, used = SHAPES[run.model]
    layers, hidden, ffn, vocab = max(2, layers // scale), hidden // scale, ffn // scale, vocab // scale
    heads, kv_heads = max(1, heads // scale), max(1, kv_heads // scale)
    attention = "sdpa" if run.attention == "flash" else "eager"
    positions = max(run.seq_len, 512)
    if architecture == "decoder":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocab, n_positions=positions, use_cache=False,
            attn_implementation=attention,
        )  # fmt: skip
        kind = transformers.GPT2LMHeadModel
    elif architecture == "encoder":
        config = transformers.BertConfig(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
            vocab_size=vocab, max_position_embeddings=positions, attn_implementation=attention,
        )  # fmt: skip
        kind = transformers.BertForMaskedLM
    else:
        more: dict[str, Any] = {}
        if experts:
            more = {"num_local_experts": experts, "num_experts_per_tok": used, "experts_implementation": run.experts}
        config = (transformers.MixtralConfig if experts else transformers.LlamaConfig)(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=positions, use_cache=False,
            attn_implementation=attention, tie_word_embeddings=False, **more,
        )  # fmt: skip
        kind = transformers.MixtralForCausalLM if experts else transformers.LlamaForCausalLM
    with torch.device(device):
        model = kind(config)
    model.train()
    if run.precision == "fp8":
        float8: Any = importlib.import_module("torchao.float8")
        recipe = replace(float8.Float8LinearConfig.from_recipe_name(run.recipe), emulate=device == "cpu")
        float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "lm_head" not in name)
    if run.checkpointing != "none":
        arguments: dict[str, Any] = {"use_reentrant": False}
        if run.checkpointing == "selective":
            checkpoint: Any = importlib.import_module("torch.utils.checkpoint")
            arguments["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, policy)
        model.gradient_checkpointing_enable(arguments)
    return model


def prepare(run: Configuration, device: str, scale: int) -> tuple[Callable[[], None], int]:
    """Make a training step, and count the model's parameters."""
    torch.backends.cuda.matmul.allow_tf32 = run.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = run.precision != "fp32"
    is_cnn = run.model in CNNS
    if is_cnn:
        torchvision: Any = importlib.import_module("torchvision")

        layout = torch.channels_last if run.channels_last else torch.contiguous_format
        model: Any = getattr(torchvision.models, run.model)().to(device).to(memory_format=layout).train()
        side = 224 // (1 if scale == 1 else 4)
        images = torch.randn(run.micro_batch, 3, side, side, device=device).to(memory_format=layout)
        labels = torch.randint(1000, (run.micro_batch,), device=device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = [(images, labels)] * run.grad_accum
    else:
        model = transformer(run, device, scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
        shape = (run.grad_accum, run.micro_batch, run.seq_len // scale)
        tokens = torch.randint(SHAPES[run.model][6] // scale, shape, device=device)
        batches = [(batch, batch) for batch in tokens]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if run.compiled:
        model.compile(backend="inductor" if device == "cuda" else "aot_eager")
    half = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    scaler = GradScaler(device, enabled=run.precision == "fp16")
    criterion = torch.nn.CrossEntropyLoss()

    def step() -> None:
        for batch, target in batches:
            with torch.autocast(device, half, enabled=half is not None):
                loss = criterion(model(batch), target) if is_cnn else model(input_ids=batch, labels=target).loss
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step, parameters


def run_steps(step: Callable[[], None], quick: bool) -> tuple[list[float], list[float]]:
    """Run a warm-up, then measure the seconds of each step."""
    cuda: Any = torch.cuda
    synchronize = cuda.synchronize if cuda.is_available() else lambda: None
    parts: list[list[float]] = []
    for least_steps, least_s, most_steps in ((3, 1.0, 25), (6, 1.5, 40)):
        times: list[float] = []
        while not times or (
            len(times) < most_steps and (sum(times) < least_s or (len(times) < least_steps and sum(times) < 6.0))
        ):
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            times.append(time.perf_counter() - start)
            if quick:
                break
        parts.append(times)
        if torch.cuda.is_available() and len(parts) == 1:
            torch.cuda.reset_peak_memory_stats()
    return parts[0], parts[1]


def columns(run: Configuration) -> dict[str, object]:
    """Return the columns of the row's inputs."""
    row: dict[str, object] = {"model": run.model, "architecture": "cnn", "parameters": 0, "gated_mlp": 0}
    if run.model in SHAPES:
        names = ("architecture", "layers", "hidden_size", "ffn_size", "attention_heads", "kv_heads", "vocab_size")
        row |= dict(zip(names, SHAPES[run.model], strict=False)) | {"seq_len": run.seq_len}
        if SHAPES[run.model][7]:
            row |= {"experts": SHAPES[run.model][7], "experts_per_token": SHAPES[run.model][8]}
        row["gated_mlp"] = int(row["architecture"] == "llama")
    return row | {
        "gpu": "h200-141gb", "gpus": 1, "gpus_per_node": 1, "precision": run.precision, "sharding": "ddp",
        "tensor_parallel": 1, "pipeline_parallel": 1, "activation_checkpointing": run.checkpointing,
        "micro_batch": run.micro_batch, "grad_accum": run.grad_accum,
        "framework": "torchvision" if run.model in CNNS else "transformers", "attention": run.attention,
        "compiled": int(run.compiled),
    }  # fmt: skip


def settings(run: Configuration) -> str:
    """Describe the settings that have no column."""
    kept = {
        "bf16": "autocast", "fp16": "autocast and gradient scaler",
        "fp8": f"autocast, torchao float8 {run.recipe} but for the output projection",
    }.get(run.precision, "fp32 weights")  # fmt: skip
    words = ["SGD with momentum" if run.model in CNNS else "fused AdamW", kept]
    words += ["channels_last" if run.channels_last else "contiguous layout"] * (run.model in CNNS)
    words += [f"experts {run.experts}"] * bool(run.model in SHAPES and SHAPES[run.model][7])
    return ", ".join(words)


FIELDS = (
    "row_id", "suite", "model", "architecture", "parameters", "layers", "hidden_size", "ffn_size", "gated_mlp",
    "attention_heads", "kv_heads", "vocab_size", "experts", "experts_per_token", "seq_len", "gpu", "gpus",
    "gpus_per_node", "precision", "sharding", "tensor_parallel", "pipeline_parallel", "sequence_parallel",
    "activation_checkpointing", "micro_batch", "grad_accum", "framework", "attention", "compiled",
    "tokens_per_second_per_gpu", "peak_memory_gib", "memory_kind", "reserved_memory_gib", "source",
)  # fmt: skip
OUT_OF_MEMORY_FIELDS = (
    *[name for name in FIELDS if name not in ("tokens_per_second_per_gpu", "memory_kind")],
    "outcome",
)


KERNEL_FIELDS = ("row_id", "step_s", "kernel", "calls", "seconds")


def kernels_of(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Profile one step: name, calls and GPU seconds of each kernel, the longest first."""
    profiler: Any = importlib.import_module("torch.profiler")
    activity = profiler.ProfilerActivity
    with profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]) as profile:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kernels = [(event.key, event.count, event.self_device_time_total / 1e6) for event in profile.key_averages()]
    return sorted(kernels, key=lambda kernel: -kernel[2])


def measure(
    run: Configuration, device: str, scale: int, kernels: Callable[[dict[str, object]], None] | None = None
) -> dict[str, object]:
    """Measure throughput and peak memory of one configuration; ``kernels`` writes rows of its kernels."""
    started = time.perf_counter()
    torch.manual_seed(0)
    step, parameters = prepare(run, device, scale)
    warm, times = run_steps(step, quick=device == "cpu")
    seconds = statistics.median(times)
    held = memory()
    if kernels is not None:
        for name, calls, taken in kernels_of(step):
            if taken > seconds / 500:
                row_of = {"step_s": f"{seconds:.4e}", "kernel": name[:160], "calls": calls, "seconds": f"{taken:.4e}"}
                kernels(row_of)
    samples = run.micro_batch * run.grad_accum * (1 if run.model in CNNS else run.seq_len)
    row = columns(run) | held | {
        "parameters": parameters, "memory_kind": "allocated", "tokens_per_second_per_gpu": f"{samples / seconds:.7g}",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {settings(run)}, median of "
        f"{len(times)}: tests/benchmarks/measure_steps.py",
    }  # fmt: skip
    spread = (max(times) - min(times)) / seconds
    log(
        f"{run}: {seconds * 1e3:.1f} ms (spread {spread:.0%} of {len(times)}, first {warm[0]:.1f} s), "
        f"{row['peak_memory_gib']} GiB, reserved {row['reserved_memory_gib']}, in {time.perf_counter() - started:.0f} s"
    )
    return row


def memory() -> dict[str, object]:
    if not torch.cuda.is_available():
        return {"peak_memory_gib": 0.0, "reserved_memory_gib": 0.0}
    return {
        "peak_memory_gib": f"{torch.cuda.max_memory_allocated() / 2**30:.6g}",
        "reserved_memory_gib": f"{torch.cuda.max_memory_reserved() / 2**30:.6g}",
    }


def clear() -> None:
    """Free the memory of the last configuration."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def set_allocator(setting: str) -> None:
    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings(setting)


def log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Measure every configuration that time allows and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--prefix", default="h200-steps-")
    parser.add_argument("--first", type=int, default=0, help="Number of the first row.")
    parser.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--kernels", action="store_true", help="GPU time by kernel, too.")
    parser.add_argument("--tiny", action="store_true", help="Check this script on the CPU with models shrunk 16 times.")
    options = parser.parse_args()
    device, scale = ("cpu", 16) if options.tiny else ("cuda", 1)
    deadline = time.monotonic() + options.seconds
    number = itertools.count(options.first)
    ran_out_path = options.out.with_stem(options.out.stem + "_out_of_memory")
    kernels_path = options.out.with_stem(options.out.stem + "_kernels") if options.kernels else Path(os.devnull)
    with (
        options.out.open("w", encoding="utf-8", newline="") as ran,
        ran_out_path.open("w", newline="") as ran_out,
        kernels_path.open("w", newline="") as of_kernels,
    ):
        writer = csv.DictWriter(ran, FIELDS, lineterminator="\n")
        out_writer = csv.DictWriter(ran_out, OUT_OF_MEMORY_FIELDS, lineterminator="\n")
        writer.writeheader()
        out_writer.writeheader()
        kernel_writer = csv.DictWriter(of_kernels, KERNEL_FIELDS, lineterminator="\n")
        kernel_writer.writeheader()
        for run in itertools.chain.from_iterable(CONFIGURATIONS[group] for group in options.only):
            if time.monotonic() > deadline:
                log(f"out of time before {run}")
                break
            identity: dict[str, object] = {"row_id": f"{options.prefix}{next(number):02}", "suite": "h200"}
            for allocator in ("default", "expandable_segments:True"):
                failed = ""
                try:
                    kernel_rows: list[dict[str, object]] = []
                    row = measure(run, device, scale, kernel_rows.append if options.kernels else None)
                    kernel_writer.writerows({"row_id": identity["row_id"]} | kernel for kernel in kernel_rows)
                    of_kernels.flush()
                    row["source"] = f"{row['source']}{'' if allocator == 'default' else ', ' + allocator}"
                    writer.writerow(identity | row)
                    ran.flush()
                except torch.OutOfMemoryError as error:
                    failed = " ".join(str(error).split())[:300]
                    held = memory()
                except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:
                    log(f"{run}: {type(error).__name__} {' '.join(str(error).split())[:500]}")
                clear()
                if not failed:
                    break
                log(f"{run}: ran out with the {allocator} allocator at {held}: {failed}")
                how = f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {settings(run)}"
                out_writer.writerow(identity | columns(run) | held | {
                    "source": f"{how}, {allocator} allocator: tests/benchmarks/measure_steps.py",
                    "outcome": "ran out of memory",
                })  # fmt: skip
                ran_out.flush()
                set_allocator("expandable_segments:True")
            set_allocator("expandable_segments:False")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
