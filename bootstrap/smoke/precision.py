"""Gain of mixed precision: speed and memory of the training step under autocast against fp32, each rank alone."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import CheckResult, progress
from bootstrap.smoke.scaling import shape_for, train

WARM_UP, STEPS = 2, 3


def check(ranks: Ranks) -> list[CheckResult]:
    """Train the scaling test's model in both precisions, with half its batch: fp32 has activations twice as large."""
    whole = shape_for(ranks.device)
    shape = replace(whole, batch=whole.batch // 2)
    ranks.barrier("precisions")
    runs = {mixed: train(ranks, shape, mixed=mixed, warm_up=WARM_UP, steps=STEPS) for mixed in (True, False)}
    mine = {
        "precision": runs[True]["precision"],
        "step_s": [statistics.median(runs[mixed]["times"]) for mixed in (True, False)],
        "peak_memory_gib": [runs[mixed]["peak_memory_gib"] for mixed in (True, False)],
    }
    results = judge(ranks.gather("precisions", mine), batch=shape.batch, on_gpu=ranks.device.type == "cuda")
    if ranks.rank == 0:
        progress(f"{mine['precision']}: {results[0].value:.2f} times the speed of fp32 on the slowest rank")
    return results


def judge(answers: list[dict[str, Any]], *, batch: int, on_gpu: bool) -> list[CheckResult]:
    """Judge the ranks' pairs (mixed, fp32). A GPU whose autocast gains nothing warns; a CPU may have no faster one."""
    gains = [full_s / mixed_s for mixed_s, full_s in (answer["step_s"] for answer in answers)]
    lowest = min(range(len(gains)), key=gains.__getitem__)
    peaks = [answer["peak_memory_gib"] for answer in answers]
    shares = [mixed_gib / full_gib for mixed_gib, full_gib in peaks] if on_gpu else []
    highest = max(range(len(shares)), key=shares.__getitem__, default=0)
    details = {"precision": answers[0]["precision"], "batch_per_rank": batch, "warm_up_steps": WARM_UP}
    return [
        CheckResult(
            name="mixed_precision_speed",
            value=gains[lowest],
            unit="of fp32",
            warn=1.0 if on_gpu else None,
            must_be="at_least",
            note=f"rank {lowest}",
            details={**details, "timed_steps": STEPS},
        ),
        CheckResult(
            name="mixed_precision_memory",
            value=shares[highest] if on_gpu else None,
            unit="of fp32's peak",
            warn=1.0,
            must_be="at_most",
            note=f"rank {highest}" if on_gpu else "GPUs only",
            details={**details, "peak_memory_gib": peaks[highest][0]},
        ),
    ]
