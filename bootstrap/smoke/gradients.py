"""DDP's gradients: equal bits on all ranks, and equal to a single process's gradients on all ranks' data."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import CheckResult

# 1.6 million parameters, in buckets of 2 MB that make several all-reduces.
HIDDEN, SEQ_LEN, BATCH, BUCKET_MB = 256, 32, 2, 2
SEED = 20260101
# DDP adds the same terms in another order: measured 8 epsilon (1.2e-7) on two H200, 5 on two CPU ranks. One wrong term
# among N ranks is an error of about 1/N.
LIMIT = 1000 * torch.finfo(torch.float32).eps


def check(ranks: Ranks, hosts: Sequence[str]) -> list[CheckResult]:
    """Train one step with DDP on all ranks, and alone; ``hosts`` is each rank's host."""
    # TF32 keeps 10 bits of a float32's mantissa: the tolerance it needs would hide a real error.
    torch.set_float32_matmul_precision("highest")
    # Drawn on the CPU: the same weights and inputs on every rank and device.
    torch.manual_seed(SEED)
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(ranks.device)
    inputs = torch.randn(BATCH * ranks.world_size, SEQ_LEN, HIDDEN).to(ranks.device)
    alone = gradients_of(model, inputs)
    device_ids = [ranks.device] if ranks.device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids, bucket_cap_mb=BUCKET_MB)
    together = gradients_of(replica, inputs[ranks.rank * BATCH : (ranks.rank + 1) * BATCH])
    digest = hashlib.sha256(torch.cat([each.flatten() for each in together]).cpu().numpy().tobytes()).hexdigest()
    error = largest(map(relative_error, together, alone))
    norm = math.hypot(*(each.double().norm().item() for each in alone))
    digests, errors, norms = zip(*ranks.gather("gradients", (digest, error, norm)), strict=True)
    return [
        _equal_on_all_ranks(digests, hosts),
        CheckResult(
            name="gradients_equal_one_process",
            value=largest(errors),
            unit="relative error",
            limit=LIMIT,
            must_be="at_most",
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in miscomputing(norms))),
        ),
    ]


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradient of each parameter, after one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def largest(errors: Iterable[float]) -> float:
    """Largest error; NaN where any is, which ``max`` keeps only if it comes first."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference of an element, as a share of the reference's largest element; NaN where either has one."""
    return ((value - reference).abs().max() / reference.abs().max()).item()


def miscomputing(norms: Sequence[float]) -> list[int]:
    """Ranks whose own gradients, without communication, have another norm than the median rank's."""
    usual = statistics.median([norm for norm in norms if math.isfinite(norm)] or [math.nan])
    # "not <=" so that NaN counts as an error.
    return [rank for rank, norm in enumerate(norms) if not abs(norm - usual) <= LIMIT * usual]


def _equal_on_all_ranks(digests: Sequence[str], hosts: Sequence[str]) -> CheckResult:
    """Count the ranks whose gradients differ from the majority's; without a majority no host is blamed."""
    usual, count = Counter(digests).most_common(1)[0]
    odd = [rank for rank, own in enumerate(digests) if own != usual]
    return CheckResult(
        name="gradients_equal_on_all_ranks",
        value=len(odd),
        unit="ranks",
        limit=0,
        must_be="at_most",
        note=f"rank {odd[0]} of {hosts[odd[0]]} has other bits than most ranks" if odd else "",
        hosts=tuple(dict.fromkeys(hosts[rank] for rank in odd)) if 2 * count > len(digests) else (),
    )
