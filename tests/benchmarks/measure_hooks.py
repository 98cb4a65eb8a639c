"""Measure DDP steps with and without compressed gradients on the GPUs of one host.

``torchrun --nproc-per-node N -m tests.benchmarks.measure_hooks OUT_FOLDER [--seconds 200] [--tiny]`` writes
``hooks.csv``. Models, settings and timing are those of measure_parallel.py, with bucket views, a static graph and no
buffer broadcast. NCCL_P2P_DISABLE=1 sends through host memory as PCIe machines do, NCCL_SHM_DISABLE=1 besides through
sockets as between nodes.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.measure_parallel import Ranks, begin, steps, timed, write
from tests.benchmarks.measure_steps import CNNS, SHAPES, Configuration, cnn, llm, transformer

FIELDS = (
    "model", "parameters", "micro_batch", "seq_len", "gpus", "transport", "compression", "bucket_mib", "buckets",
    "step_s", "hook_host_s", "peak_memory_gib", "reserved_memory_gib", "source",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run; compression "alone" sends nothing."""

    run: Configuration
    compression: str
    bucket_mib: int = 25


MODELS = (llm("bert-large", 512, 24), llm("llama-1b", 2048, 4), cnn("resnet50", 256))
COMPRESSIONS = (
    ("alone", 25), ("none", 25), ("bf16", 25), ("powersgd-4", 25), ("powersgd-1", 25), ("none", 100), ("bf16", 100),
    ("fp16", 25), ("powersgd-4", 100), ("powersgd-32", 25),
)  # fmt: skip
CASES = [Case(run=run, compression=name, bucket_mib=mib) for run in MODELS for name, mib in COMPRESSIONS]


def hook(compression: str, spent: list[float]) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the hook; each bucket's host seconds go to ``spent``."""
    hooks: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks")
    if compression.startswith("powersgd-"):
        module = hooks.powerSGD_hook
        rank = int(compression.removeprefix("powersgd-"))
        # 2 is the least: DDP rebuilds its buckets after the first step.
        state = module.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        call = module.powerSGD_hook
    else:
        state, call = None, getattr(hooks.default_hooks, f"{compression}_compress_hook")

    def timed_hook(state: Any, bucket: Any) -> Any:
        start = time.perf_counter()
        future = call(state, bucket)
        spent.append(time.perf_counter() - start)
        return future

    timed_hook.__annotations__ = {}  # DDP refuses any but its own
    return state, timed_hook


def build(run: Configuration, ranks: Ranks) -> tuple[Any, torch.optim.Optimizer, Callable[[Any], torch.Tensor]]:
    """Make a model, its optimizer, and a function from the wrapped model to the loss."""
    torch.manual_seed(0)
    if run.model in CNNS:
        torchvision: Any = importlib.import_module("torchvision")
        model = getattr(torchvision.models, run.model)().to(ranks.device, memory_format=torch.channels_last).train()
        side, batch = (56, 2) if ranks.tiny else (224, run.micro_batch)
        images = torch.randn(batch, 3, side, side, device=ranks.device).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (batch,), device=ranks.device)
        criterion = torch.nn.CrossEntropyLoss()
        return model, torch.optim.SGD(model.parameters(), 0.1, 0.9), lambda ddp: criterion(ddp(images), labels)
    scale = 16 if ranks.tiny else 1
    model = transformer(run, ranks.device, scale)
    torch.manual_seed(1 + ranks.rank)
    batch = 1 if ranks.tiny else run.micro_batch
    tokens = torch.randint(SHAPES[run.model][6] // scale, (batch, run.seq_len // scale), device=ranks.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=not ranks.tiny)
    return model, optimizer, lambda ddp: ddp(input_ids=tokens, labels=tokens).loss


def measure(case: Case, ranks: Ranks, _: int) -> dict[str, Any]:
    """Measure one case; every rank runs this."""
    run = case.run
    model, optimizer, loss_of = build(run, ranks)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    alone = case.compression == "alone"
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=case.bucket_mib,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        static_graph=not alone,
    )
    spent: list[float] = []
    if case.compression not in ("alone", "none"):
        ddp.register_comm_hook(*hook(case.compression, spent))
    by_step: list[list[float]] = []

    def step() -> None:
        spent.clear()
        with ddp.no_sync() if alone else nullcontext():
            with torch.autocast(ranks.device, torch.bfloat16):
                loss = loss_of(ddp)
            loss.backward()  # type: ignore[no-untyped-call]
        by_step.append([*spent])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, number, held = timed(step, ranks)
    buckets = len(by_step[-1])
    host_s = statistics.median(map(sum, by_step[-number:]))
    disabled = [os.environ.get(f"NCCL_{name}_DISABLE") == "1" for name in ("P2P", "SHM")]
    ranks.log(f"{case.compression} {case.bucket_mib} MiB {run}: {seconds * 1e3:.2f} ms, {buckets} buckets {held}")
    return held | {
        "model": run.model,
        "parameters": parameters,
        "micro_batch": run.micro_batch,
        "seq_len": run.seq_len,
        "gpus": ranks.world,
        "transport": "links" if not disabled[0] else "sockets" if disabled[1] else "host memory",
        "compression": case.compression,
        "bucket_mib": case.bucket_mib,
        "buckets": buckets,
        "step_s": f"{seconds:.6g}",
        "hook_host_s": f"{ranks.agreed(host_s):.6g}",
        "source": f"measured {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, median of {number}: "
        "tests/benchmarks/measure_hooks.py",
    }


def main() -> None:
    """Measure every case that time allows."""
    out, ranks, deadline = begin()
    ranks.log(f"torch {torch.__version__}, {ranks.world} ranks")
    write(out / "hooks.csv", ranks, steps(CASES, measure, ranks, deadline), FIELDS)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
