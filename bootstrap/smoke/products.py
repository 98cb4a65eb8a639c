"""Matrix products of each rank at once: every rank's result is the same, and no rank is slow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch

from bootstrap.contract.node_plan import Band
from bootstrap.smoke.ranks import Ranks, seconds_each
from bootstrap.smoke.report import CheckResult, band_limits

SIDE = {"cuda": 8192, "cpu": 384}
# Elements of the compared product. Its sums are whole numbers below 2**24, which 32 bits add up exactly in any order.
LARGEST = 15
SEED = 20260101
# Shares of the median rank's rate below which a rank warns and fails. GPUs of one model differ by 8% and at most 22% in
# healthy clusters (https://arxiv.org/abs/2208.11035); a machine that was 10% slower slowed a whole run
# (https://arxiv.org/abs/2402.15627).
WARN, FAIL = 0.9, 0.75


def check(ranks: Ranks, hosts: Sequence[str], expected: Band | None, *, budget_s: float) -> list[CheckResult]:
    """Compare each rank's product and rate with the other ranks' and the plan's; ``hosts`` is each rank's host."""
    ranks.barrier("products")
    rates, sums = zip(*ranks.gather("products", _measure(ranks, budget_s)), strict=True)
    median = statistics.median(rates)
    slow = [rank for rank, rate in enumerate(rates) if rate < FAIL * median]
    slow = slow or [rank for rank, rate in enumerate(rates) if rate < WARN * median]
    lowest = min(range(len(rates)), key=rates.__getitem__)
    band = expected if ranks.device.type == "cuda" else None
    return [
        _equal(sums, hosts),
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


def _equal(sums: Sequence[int], hosts: Sequence[str]) -> CheckResult:
    """Count the ranks whose product differs from that of most ranks; without a majority no host is to blame."""
    usual, count = Counter(sums).most_common(1)[0]
    odd = [rank for rank, own in enumerate(sums) if own != usual]
    blamed = tuple(dict.fromkeys(hosts[rank] for rank in odd)) if 2 * count > len(sums) else ()
    return CheckResult(
        name="products_equal_on_all_ranks",
        value=len(odd),
        unit="ranks",
        limit=0,
        must_be="at_most",
        note=f"rank {odd[0]} of {hosts[odd[0]]} computes something else than most ranks" if odd else "",
        hosts=blamed,
    )


def _measure(ranks: Ranks, budget_s: float) -> tuple[float, int]:
    """TFLOP/s of this rank, and the sum of its product's bits."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"
    side = SIDE[device.type]
    # The precision that optimizer/performance/expected.py has the expected rate of.
    narrow = torch.bfloat16 if on_gpu and torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    kind = narrow if on_gpu else torch.float32
    a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    once_s = product_seconds(a, b, out, warm_up=2, iterations=1)[0]
    iterations = max(3, int(budget_s / once_s))
    times = product_seconds(a, b, out, warm_up=0, iterations=min(iterations, 2000))
    # The last third, at the power limit. A CPU's rank shares its cores with others: the fastest is its own speed.
    seconds = statistics.median(times[-max(1, len(times) // 3) :]) if on_gpu else min(times)
    generator = torch.Generator().manual_seed(SEED)
    for factor in (a, b):
        whole = torch.randint(-LARGEST, LARGEST + 1, (side, side), dtype=torch.int8, generator=generator)
        factor.copy_(whole)
    return 2 * side**3 / seconds / 1e12, sum_of_bits(exact_product(a, b))


def product_seconds(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, warm_up: int, iterations: int
) -> list[float]:
    """Seconds of each product."""
    return seconds_each(lambda: torch.mm(a, b, out=out), device=a.device, warm_up=warm_up, iterations=iterations)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product whose partial sums are added up in 32 bits, whatever kernel the library takes."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    return a @ b


def sum_of_bits(product: torch.Tensor) -> int:
    """Sum of the elements' bits as whole numbers, which a change of any one element changes."""
    bits = product.view(torch.int16 if product.itemsize == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64))
