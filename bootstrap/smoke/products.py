"""Speed of matrix products of all ranks at once: no rank is slow, and all are as fast as the plan expects."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from bootstrap.contract.node_plan import Band
from bootstrap.smoke.ranks import Ranks, seconds_each
from bootstrap.smoke.report import CheckResult, band_limits

SIDE = {"cuda": 8192, "cpu": 384}
# Shares of the median rank's rate below which a rank warns and fails. GPUs of one model differ by 8% and at most 22% in
# healthy clusters (https://arxiv.org/abs/2208.11035); a machine that was 10% slower slowed a whole run
# (https://arxiv.org/abs/2402.15627).
WARN, FAIL = 0.9, 0.75


def check(ranks: Ranks, hosts: Sequence[str], expected: Band | None, *, budget_s: float) -> list[CheckResult]:
    """Compare each rank's rate with the other ranks' and the plan's; ``hosts`` is each rank's host."""
    ranks.barrier("products")
    rates = ranks.gather("products", _measure(ranks, budget_s))
    median = statistics.median(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < FAIL * median]
    slow = slow or [rank for rank, rate in enumerate(rates) if rate < WARN * median]
    lowest = min(range(len(rates)), key=rates.__getitem__)
    band = expected if ranks.device.type == "cuda" else None
    return [
        CheckResult(
            name="slowest_rank_products",
            value=rates[lowest] / median,
            unit="of the median rank",
            limit=FAIL,
            warn=WARN,
            note=f"rank {lowest} of {hosts[lowest]}",
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in slow)),
        ),
        CheckResult(
            name="median_rank_products",
            value=median,
            unit="TFLOP/s",
            note=f"the plan expects {band.value:.4g}" if band else "",
            **band_limits(band),
        ),
    ]


def _measure(ranks: Ranks, budget_s: float) -> float:
    """TFLOP/s of this rank."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    side = SIDE[device.type]
    # The precision that optimizer/performance/expected.py has the expected rate of.
    narrow = torch.bfloat16 if on_gpu and torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    kind = narrow if on_gpu else torch.float32
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(warm_up: int, iterations: int) -> list[float]:
        return seconds_each(lambda: torch.mm(a, b, out=out), device=device, warm_up=warm_up, iterations=iterations)

    times = seconds(0, min(2000, max(3, int(budget_s / seconds(2, 1)[0]))))
    # The last third, at the power limit. A CPU's rank shares its cores with others: the fastest is its own speed.
    typical_s = statistics.median(times[-max(1, len(times) // 3) :]) if on_gpu else min(times)
    return 2 * side**3 / typical_s / 1e12
