"""Weak scaling of a real training step: the speed of all ranks together over the sum of their speeds alone."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke import models
from bootstrap.smoke.gradients import digest, equal_on_all_ranks
from bootstrap.smoke.ranks import Ranks, seconds_each, slowest_rank
from bootstrap.smoke.report import CheckResult, progress

SEED = 20260102
WARM_UP = 5
STEPS = {"cuda": 20, "cpu": 10}
# (least GPU memory in GiB, sequences): a step computes longer than it communicates, in under half of the memory.
GPU_BATCH = ((70, 32), (30, 16), (14, 8))


def shape_for(device: torch.device) -> models.Shape:
    """GPT-2 small's layers (136 million parameters) on a GPU; a toy on CPU and on a slice of a GPU."""
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else 0
    batch = next((batch for at_least_gib, batch in GPU_BATCH if memory_gib >= at_least_gib), None)
    if batch is None:
        return models.Shape(layers=2, hidden=128, heads=4, vocabulary=1024, seq_len=64, batch=8)
    return models.Shape(layers=12, hidden=768, heads=12, vocabulary=32768, seq_len=1024, batch=batch)


def check(ranks: Ranks, *, min_scaling_efficiency: float | None) -> list[CheckResult]:
    """Compare the speed of all ranks under DDP with each rank's alone (one at a time a node), the same batch a rank."""
    shape = shape_for(ranks.device)
    alone: dict[str, Any] = {}
    for turn in range(ranks.local_world_size):
        ranks.barrier(f"turn {turn}")
        if turn == ranks.local_rank:
            alone = train(ranks, shape)
    ranks.barrier("all together")
    together = train(ranks, shape, together=True)

    answers = ranks.gather("scaling", {"alone": alone, "together": together})
    alone_samples_per_s = [shape.batch / statistics.median(a["alone"]["times"]) for a in answers]
    step_s = statistics.median(slowest_rank([a["together"]["times"] for a in answers]))
    together_samples_per_s = shape.batch * ranks.world_size / step_s
    efficiency = together_samples_per_s / sum(alone_samples_per_s)
    model = {name: value for name, value in asdict(shape).items() if name != "batch"}
    unlearned = [rank for rank, a in enumerate(answers) if not a["together"]["last_loss"] < a["together"]["first_loss"]]
    if ranks.rank == 0:
        progress(f"training: {together_samples_per_s:.1f} sequences/s on all ranks, {efficiency:.1%} of alone")
    return [
        equal_on_all_ranks("parameters_equal_after_training", [a["together"]["digests"] for a in answers]),
        CheckResult(
            name="loss_falls",
            value=len(unlearned),
            unit="ranks where it does not",
            limit=0,
            must_be="at_most",
            note=f"ranks {unlearned}" if unlearned else "",
            details={
                "first": [a["together"]["first_loss"] for a in answers],
                "last": [a["together"]["last_loss"] for a in answers],
            },
        ),
        CheckResult(
            name="scaling_efficiency",
            value=efficiency,
            unit="of linear",
            limit=min_scaling_efficiency,
            must_be="at_least",
            note="more than linear: something else slowed the ranks alone; measure again" if efficiency > 1.05 else "",
            details={
                "model": {**model, "parameters": together["parameters"]},
                "batch_per_rank": shape.batch,
                "precision": together["precision"],
                "optimizer": "adamw",
                "warm_up_steps": WARM_UP,
                "timed_steps": STEPS[ranks.device.type],
                "one_process_sequences_per_s": alone_samples_per_s,
                "all_ranks_sequences_per_s": together_samples_per_s,
                "all_ranks_tokens_per_s": together_samples_per_s * shape.seq_len,
                "all_ranks_step_ms": step_s * 1e3,
                "peak_memory_gib": together["peak_memory_gib"],
            },
        ),
    ]


def train(ranks: Ranks, shape: models.Shape, *, together: bool = False) -> dict[str, Any]:
    """Train on one repeated batch, by DDP or alone; in 16 bits on a GPU, in fp32 on CPU."""
    device = ranks.device
    on_gpu = device.type == "cuda"
    model: nn.Module = models.build(shape, seed=SEED, device=device, dtype=torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if together:
        model = DistributedDataParallel(model, [device] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_gpu)
    tokens = models.random_tokens(shape, shape.batch, seed=SEED + (ranks.rank if together else 0)).to(device)
    # bf16 on GPUs that have it (Ampere and later), fp16 before; the weights are thrown away, so no loss scaler.
    has_bf16 = not on_gpu or torch.cuda.get_device_capability(device)[0] >= 8
    precision = torch.bfloat16 if has_bf16 else torch.float16
    autocast = torch.autocast(device.type, dtype=precision) if on_gpu else contextlib.nullcontext()
    losses: list[torch.Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = seconds_each(step, device=device, warm_up=WARM_UP, iterations=STEPS[device.type])
    return {
        "times": times,
        "parameters": parameters,
        "precision": str(precision).removeprefix("torch.") if on_gpu else "float32",
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if on_gpu else None,
        "digests": {n.removeprefix("module."): digest(p) for n, p in model.named_parameters()} if together else {},
    }
