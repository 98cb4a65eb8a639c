"""Straggler test: each rank's matrix products at once, and what slows the GPUs meanwhile."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import torch

from bootstrap.contract.gpus import slowed_by
from bootstrap.contract.node_plan import Band
from bootstrap.smoke.ranks import Ranks, seconds_each
from bootstrap.smoke.report import CheckResult, band_limits, find_low

SIDE = {"cuda": 8192, "cpu": 384}
# Shares of the median rank's rate below which a rank warns and fails. GPUs of one model differ by 8% and at most 22% in
# healthy clusters (https://arxiv.org/abs/2208.11035); a machine that was 10% slower slowed a whole run
# (https://arxiv.org/abs/2402.15627).
WARN, FAIL = 0.9, 0.75
QUERY = ("temperature.gpu", "clocks.sm", "power.draw", "clocks_event_reasons.active")


def check(ranks: Ranks, hosts: Sequence[str], expected: Band | None, *, budget_s: float) -> list[CheckResult]:
    """Compare each rank's products with the median rank's and the plan's; ``hosts`` is each rank's host."""
    ranks.barrier("products")
    answers = ranks.gather("products", _measure(ranks, budget_s))
    rates = [answer["tflop_per_s"] for answer in answers]
    median = statistics.median(rates)
    slow = find_low(rates, warn=WARN * median, fail=FAIL * median)
    lowest = min(range(len(rates)), key=rates.__getitem__)
    throttled = [rank for rank, answer in enumerate(answers) if answer["gpu"] and answer["gpu"]["slowed_by"]]
    band = expected if ranks.device.type == "cuda" else None
    return [
        CheckResult(
            name="slowest_rank_products",
            value=rates[lowest] / median,
            unit="of the median rank",
            limit=FAIL,
            warn=WARN,
            must_be="at_least",
            note=f"rank {lowest} of {hosts[lowest]}",
            hosts=_hosts(slow, hosts),
            details={"tflop_per_s": rates, "gpus": [answer["gpu"] for answer in answers]},
        ),
        CheckResult(
            name="median_rank_products",
            value=median,
            unit="TFLOP/s",
            must_be="at_least",
            note=f"the plan expects {band.value:.4g}" if band else "",
            **band_limits(band),
        ),
        CheckResult(
            name="throttled_gpus",
            value=len(throttled) if all(answer["gpu"] for answer in answers) else None,
            unit="GPUs",
            warn=0,
            must_be="at_most",
            note="; ".join(f"rank {r} of {hosts[r]}: {', '.join(answers[r]['gpu']['slowed_by'])}" for r in throttled),
            hosts=_hosts(throttled, hosts),
        ),
    ]


def _hosts(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts[rank] for rank in ranks))


def _measure(ranks: Ranks, budget_s: float) -> dict[str, Any]:
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    side = SIDE[device.type]
    # The precision that optimizer/performance/expected.py has the expected rate of.
    narrow = torch.bfloat16 if on_gpu and torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    a, b = (torch.randn(side, side, device=device).to(narrow if on_gpu else torch.float32) for _ in range(2))
    out = torch.empty_like(a)
    once_s = product_seconds(a, b, out, warm_up=2, iterations=1)[0]
    iterations = max(3, int(budget_s / once_s))
    facts: list[dict[str, Any] | None] = [None]
    reader = threading.Thread(target=lambda: facts.__setitem__(0, _read_gpu(device)), daemon=True)
    if on_gpu:
        reader.start()
    times = product_seconds(a, b, out, warm_up=0, iterations=min(iterations, 2000))
    if on_gpu:
        reader.join(timeout=10)
    # The last third, at the power limit. A CPU's rank shares its cores with others: the fastest is its own speed.
    seconds = statistics.median(times[-max(1, len(times) // 3) :]) if on_gpu else min(times)
    return {"tflop_per_s": 2 * side**3 / seconds / 1e12, "gpu": facts[0]}


def product_seconds(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, warm_up: int, iterations: int
) -> list[float]:
    """Seconds of each product."""
    return seconds_each(lambda: torch.mm(a, b, out=out), device=a.device, warm_up=warm_up, iterations=iterations)


def _read_gpu(device: torch.device) -> dict[str, Any] | None:
    """Temperature, clock, power and what slows the GPU of this rank; None where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    command += [f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=8, check=False)
    except subprocess.TimeoutExpired:
        return None
    return parse_gpu(done.stdout) if done.returncode == 0 else None


def parse_gpu(line: str) -> dict[str, Any] | None:
    """Parse a line of nvidia-smi; None where a GPU (a slice) does not report."""
    try:
        temperature, clock, power, reasons = (field.strip() for field in line.strip().split(","))
        active = int(reasons, 16)
        figures = {"temperature_celsius": float(temperature), "clock_mhz": float(clock), "power_w": float(power)}
    except ValueError:
        return None
    return {**figures, "slowed_by": slowed_by(active)}
