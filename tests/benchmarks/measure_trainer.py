"""Measure the reference trainer on the GPUs of one host.

``torchrun --standalone --nproc-per-node N -m tests.benchmarks.measure_trainer OUT.jsonl [--seconds 460] [--tiny]``
appends one JSON object a measurement. Parts: ``scaling`` (DDP's settings, weak scaling against the step alone),
``layouts`` (predicted by ``gpufleet estimate``), ``checkpointing`` (of activations, in turns), ``profiles`` (what the
GPU does in a step: computes, waits for a collective, is idle). ``--rows 2`` writes the layouts on 2 GPUs to OUT, in the
columns of measured_runs.csv, for ``gpufleet estimate --batch``, and measures nothing. Random weights; one synthetic
batch again and again, so that reading data is not measured; clipping and fused AdamW as in a run.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer import parallelize
from bootstrap.trainer import run as trainer
from bootstrap.trainer.config import TrainerConfig, parse_config
from bootstrap.trainer.mesh import data_rank

cuda: Any = torch.cuda  # its events have no types
Step = Callable[[], object]
Case = tuple[str, int, str]  # model, sequence length, flags

# layers, hidden, feed-forward, heads, key-value heads, vocabulary
LLAMAS = {
    "llama-1b": (16, 2048, 8192, 32, 8, 128256),
    "llama-1.3b": (24, 2048, 5632, 16, 16, 32000),
    "llama-1.5b": (28, 1536, 8960, 12, 2, 152000),
    "llama-3b": (28, 3072, 8192, 24, 8, 128256),
    "llama-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-13b": (40, 5120, 13824, 40, 40, 32000),
}
LAYOUTS: list[Case] = [
    ("llama-1b", 2048, "--sharding ddp --micro-batch 4"),
    ("llama-1b", 2048, "--sharding zero1 --micro-batch 4 --grad-accum 2"),
    ("llama-3b", 2048, "--sharding zero2 --micro-batch 2"),
    ("llama-3b", 2048, "--sharding zero3 --micro-batch 4 --activation-checkpointing full"),
    ("llama-8b", 2048, "--sharding zero3 --micro-batch 1"),
    ("llama-8b", 2048, "--sharding zero3 --micro-batch 2 --grad-accum 2 --activation-checkpointing full"),
    ("llama-3b", 2048, "--sharding zero3 --micro-batch 4 --activation-checkpointing selective"),
    ("llama-3b", 2048, "--sharding zero1 --tensor-parallel 2 --micro-batch 4 --sequence-parallel"),
    ("llama-1b", 16384, "--sharding zero3 --context-parallel 2 --micro-batch 1 --activation-checkpointing full"),
    ("llama-1b", 2048, "--sharding zero3 --micro-batch 1 --grad-accum 4"),
]
FOUR_GPUS: list[Case] = [
    ("llama-13b", 2048, "--sharding zero3 --micro-batch 1 --activation-checkpointing full"),
    ("llama-8b", 2048, "--sharding zero1 --tensor-parallel 4 --micro-batch 2 --sequence-parallel"),
    ("llama-1b", 32768, "--sharding zero3 --context-parallel 4 --micro-batch 1 --activation-checkpointing full"),
    ("llama-8b", 2048, "--sharding zero3 --micro-batch 2 --grad-accum 4"),
]
SCALING: list[Case] = [
    ("resnet50", 1, "--optimizer sgd --micro-batch 256 --clip-norm 0"),
    ("bert-large", 512, "--micro-batch 24"),
    ("llama-1.3b", 2048, "--micro-batch 4"),
]

CHECKPOINTING: list[Case] = [
    ("llama-1.5b", 8192, f"--sharding zero1 --micro-batch 1 --activation-checkpointing {kept}")
    for kept in ("none", "full", "selective")
]

PROFILES = [*SCALING, LAYOUTS[1], LAYOUTS[6], LAYOUTS[7], LAYOUTS[9]]


def layouts(world: int) -> list[Case]:
    """Layouts that ``world`` GPUs can have."""
    return [*LAYOUTS, *(FOUR_GPUS if world % 4 == 0 else ())]


def architecture(name: str, tiny: bool) -> dict[str, Any]:
    if name == "resnet50":
        return {"torchvision": "resnet50"}
    if name == "bert-large":
        size = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        return {"model_type": "bert", **(small if tiny else size), "vocab_size": 1000 if tiny else 30522}
    layers, hidden, ffn, heads, kv_heads, vocab = (2, 64, 128, 8, 4, 512) if tiny else LLAMAS[name]
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip


def configuration(case: Case, world: int, tiny: bool) -> TrainerConfig:
    name, seq_len, flags = case
    config = parse_config(
        ["--architecture", json.dumps(architecture(name, tiny)), "--gpus-per-node", str(world), "--steps", "1000",
         "--seq-len", str(max(1, seq_len // 32) if tiny else seq_len), *flags.split()],
        {},
    )  # fmt: skip
    return replace(config, micro_batch=min(config.micro_batch, 2)) if tiny else config


class Bench:
    """This process, and where the measurements go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tiny: bool = options.tiny
        self.out: Path = options.out
        self.cases: str = options.cases
        self.deadline = time.monotonic() + options.seconds
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = trainer.set_device(configuration(LAYOUTS[0], self.world, True))
        torch.backends.cudnn.benchmark = True

    def agreed(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        tensor = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def seconds(self, step: Step, least_s: float = 2.5) -> tuple[float, int]:
        """Measure a step: warm-up of 1 s, then blocks of steps without a wait in between; median block."""
        self.block(step, 3)
        gc.collect()
        gc.freeze()  # as the run does after its first step
        each = self.agreed(self.block(step, 2))
        self.block(step, max(0, int(1.0 / each)) if not self.tiny else 0)
        if self.device.type == "cuda":
            cuda.reset_peak_memory_stats()
        count = 1 if self.tiny else max(2, min(50, int(least_s / 4 / each)))
        return statistics.median(self.agreed(self.block(step, count)) for _ in range(1 if self.tiny else 4)), 4 * count

    def block(self, step: Step, count: int) -> float:
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / max(1, count)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            cuda.synchronize()

    def write(self, **row: Any) -> None:
        if self.device.type == "cuda":
            row["peak_allocated_gib"] = round(self.agreed(cuda.max_memory_allocated()) / 2**30, 3)
            row["peak_reserved_gib"] = round(self.agreed(cuda.max_memory_reserved()) / 2**30, 3)
        if self.rank == 0:
            print(json.dumps(row), file=sys.stderr, flush=True)
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def clear(self) -> None:
        gc.enable()
        gc.unfreeze()
        gc.collect()
        torch._dynamo.reset()
        if self.device.type == "cuda":
            cuda.empty_cache()
            cuda.reset_peak_memory_stats()

    def attempt(self, name: str, measure: Callable[[], object]) -> None:
        """Measure where time allows; report a failure and go on."""
        if not re.search(self.cases, name):
            return
        if self.agreed(time.monotonic() - self.deadline) > 0:
            if self.rank == 0:
                print(f"out of time before {name}", file=sys.stderr)
            return
        started = time.monotonic()
        try:
            measure()
        except Exception as error:  # the other measurements go on
            text = f"{name}: rank {self.rank} {type(error).__name__} {' '.join(str(error).split())[:800]}"
            print(text, file=sys.stderr, flush=True)
            if isinstance(error, torch.OutOfMemoryError):
                raise
        self.clear()
        if self.rank == 0:
            print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def batches(bench: Bench, config: TrainerConfig, rank: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one step."""
    data = trainer.open_samples(config, image_size=32 if bench.tiny else 224)
    each = torch.arange(config.micro_batch) + rank * 1000
    return [data.batch(each + 100 * number, bench.device) for number in range(count)]


def assembled_step(bench: Bench, config: TrainerConfig) -> tuple[Step, trainer.Assembled]:
    """Lay the model out, and return a step over one batch."""
    built = trainer.assemble(config, bench.device)
    data = batches(bench, built.config, data_rank(built.mesh), built.config.grad_accum)
    return lambda: built.stepper.step(data), built


def write_step(bench: Bench, part: str, case: Case, config: TrainerConfig, step: Step, **row: Any) -> None:
    """Measure a step, and write it; tokens are samples of a CNN."""
    seconds, steps = bench.seconds(step)
    gpus = dist.get_world_size()
    samples = config.micro_batch * config.grad_accum * gpus // config.tensor_parallel // config.context_parallel
    bench.write(
        part=part, loop="trainer", model=case[0], seq_len=config.seq_len, flags=case[2], gpus=gpus,
        step_s=round(seconds, 6), steps=steps,
        tokens_per_second_per_gpu=round(samples * config.seq_len / seconds / gpus, 1), **row,
    )  # fmt: skip


def measure_trainer(bench: Bench, part: str, case: Case, more: str = "", **row: Any) -> None:
    """Measure one configuration of the trainer."""
    case = (case[0], case[1], f"{case[2]} {more}".strip())
    step, built = assembled_step(bench, configuration(case, bench.world, bench.tiny))
    write_step(bench, part, case, built.config, step, **row)


def profile(bench: Bench, case: Case, steps: int = 3, **row: Any) -> None:
    """Divide a step's time on this rank's GPU: products and other kernels, a collective alone, nothing."""
    config = configuration(case, bench.world, bench.tiny)
    step, _ = assembled_step(bench, config)
    profiler: Any = importlib.import_module("torch.profiler")
    activity = profiler.ProfilerActivity
    bench.block(step, 8)
    waits = host_waits(step) if bench.device.type == "cuda" else []
    with profiler.profile(activities=[activity.CUDA if bench.device.type == "cuda" else activity.CPU]) as trace:
        seconds = bench.block(step, steps)
    events = [  # kernels and copies, without the host's calls that start them
        event for event in trace.profiler.kineto_results.events()
        if event.duration_ns() > 0 and event.device_type().name.lower() == bench.device.type
    ]  # fmt: skip
    spans = [(event.start_ns(), event.start_ns() + event.duration_ns(), "nccl" in event.name()) for event in events]
    busy, computing = covered(spans), covered([span for span in spans if not span[2]])
    kernels: dict[str, float] = {}
    for event in events:
        name = event.name()[:80]
        kernels[name] = kernels.get(name, 0.0) + event.duration_ns() / 1e9 / steps
    bench.write(
        part="profiles", loop="trainer", model=case[0], flags=case[2], gpus=dist.get_world_size(),
        step_s=round(seconds, 6),
        computing_s=round(computing / steps, 6), collective_alone_s=round((busy - computing) / steps, 6),
        collective_s=round(covered([span for span in spans if span[2]]) / steps, 6),
        idle_s=round(seconds - busy / steps, 6), host_waits=len(waits),
        kernels={name: round(each, 6) for name, each in sorted(kernels.items(), key=lambda item: -item[1])[:40]}, **row,
    )  # fmt: skip


def host_waits(step: Step) -> list[str]:
    """Run a step; the operations in which the host waited for the GPU."""
    cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        step()
        cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno} {each.message}" for each in found if "synchroniz" in str(each.message)]


def covered(spans: list[tuple[int, int, bool]]) -> float:
    """Seconds in at least one of the spans of nanoseconds."""
    total, end = 0, 0
    for start, stop, _ in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e9


# Layouts that keep replicas, by name: flags of the trainer, and DDP's bucket in MiB (0: its default).
VARIANTS = {"as shipped": ("", 0), "bucket 100": ("", 100), "zero1": ("--sharding zero1", 0)}


def scaling(bench: Bench, alone: bool, more: str = "") -> None:
    """Measure replicas; ``alone`` on each rank by itself, in a group of one."""
    for case in SCALING:
        for name in ("as shipped",) if alone else VARIANTS:
            measure = partial(scaling_of, bench, case, name, alone, more)
            bench.attempt(f"scaling {case[0]} {name}{' alone' * alone}", measure)


def scaling_of(bench: Bench, case: Case, name: str, alone: bool, more: str) -> None:
    flags, bucket = VARIANTS[name]
    wrap = partial(DistributedDataParallel, bucket_cap_mb=bucket) if bucket else DistributedDataParallel
    with patch.object(parallelize, "DistributedDataParallel", wrap):
        measure_trainer(bench, "scaling", case, f"{more} {flags}", variant=name, alone=alone)


def write_rows(path: Path, world: int, gpu: str) -> None:
    """Write configurations in the columns of measured_runs.csv."""
    rows = []
    for number, case in enumerate([*layouts(world), *SCALING]):
        config = configuration(case, world, tiny=False)
        shape = config.architecture
        is_llama = config.family == "decoder"
        rows.append({
            "row_id": f"trainer-{number:02}", "suite": "trainer", "model": case[0],
            "architecture": "llama" if is_llama else config.family, "gated_mlp": int(is_llama),
            "layers": shape.get("num_hidden_layers", ""), "hidden_size": shape.get("hidden_size", ""),
            "ffn_size": shape.get("intermediate_size", ""), "attention_heads": shape.get("num_attention_heads", ""),
            "kv_heads": shape.get("num_key_value_heads", shape.get("num_attention_heads", "")),
            "vocab_size": shape.get("vocab_size", ""), "seq_len": config.seq_len, "gpu": gpu, "gpus": world,
            "gpus_per_node": world, "precision": config.precision, "sharding": config.sharding,
            "tensor_parallel": config.tensor_parallel, "context_parallel": config.context_parallel,
            "sequence_parallel": int(config.sequence_parallel), "pipeline_parallel": 1,
            "activation_checkpointing": config.activation_checkpointing, "micro_batch": config.micro_batch,
            "grad_accum": config.grad_accum, "optimizer": config.optimizer, "attention": "flash", "compiled": 0,
            "method": config.tuning.method, "lora_targets": config.tuning.lora_targets, "frozen": config.tuning.frozen,
            "framework": "gpufleet", "flags": case[2],
        })  # fmt: skip
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--parts", nargs="*", default=["layouts", "scaling"])
    parser.add_argument("--cases", default="", help="Regular expression of the measurements' names.")
    parser.add_argument("--more", default="", help="More of the trainer's flags, for layouts and scaling.")
    parser.add_argument("--tiny", action="store_true", help="Check this script on the CPU.")
    parser.add_argument("--rows", type=int, help="GPUs: write the rows of the layouts and measure nothing.")
    parser.add_argument("--gpu", default="h200-141gb", help="GPU of the rows.")
    options = parser.parse_args()
    if options.rows:
        write_rows(options.out, options.rows, options.gpu)
        return
    bench = Bench(options)
    if {"scaling", "profiles"} & set(options.parts):
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(store=store, rank=0, world_size=1)
        if "scaling" in options.parts:
            scaling(bench, alone=True, more=options.more)
        if "profiles" in options.parts:
            for case in SCALING:
                bench.attempt(f"profile {case} alone", partial(profile, bench, case, alone=True))
        dist.destroy_process_group()
    trainer.init_process_group(bench.device)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    bench.write(part="versions", gpus=bench.world, **versions)
    if "layouts" in options.parts:
        for number, case in enumerate(layouts(bench.world)):
            measure = partial(measure_trainer, bench, "layouts", case, options.more, row_id=f"trainer-{number:02}")
            bench.attempt(f"{case}", measure)
    if "checkpointing" in options.parts:
        for case, turn in itertools.product(CHECKPOINTING, range(2)):
            bench.attempt(f"{case}", partial(measure_trainer, bench, "checkpointing", case, options.more, turn=turn))
        for case in CHECKPOINTING:
            bench.attempt(f"profile {case}", partial(profile, bench, case))
    if "profiles" in options.parts:
        for case in PROFILES:
            bench.attempt(f"profile {case}", partial(profile, bench, case, alone=False))
    if "scaling" in options.parts:
        scaling(bench, alone=False, more=options.more)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
