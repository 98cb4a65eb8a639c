"""Gradient test: DDP's gradients between ranks, and against one process's on all data."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke.ranks import Ranks
from bootstrap.smoke.report import CheckResult

HIDDEN, VOCABULARY, SEQ_LEN, BATCH = 256, 512, 32, 2
# 1.8 million parameters in buckets of 2 MB make several all-reduces.
BUCKET_MB = 2
SEED = 20260101

# DDP adds the same terms in another order: measured 8 epsilon (1.2e-7) on two H200, 5 on two CPU ranks. One wrong term
# among N ranks is an error of about 1/N.
LIMIT = 1000 * torch.finfo(torch.float32).eps


class Transformer(nn.Module):
    """Two transformer layers without dropout: runs on the same data can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each next token (a scalar), of ``tokens`` [batch, SEQ_LEN + 1]."""
        logits = self.head(self.layers(self.token(tokens[:, :-1])))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def named_gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of each parameter by its name, after one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    model(tokens).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name.removeprefix("module.")] = parameter.grad
    return gradients


def check(ranks: Ranks) -> list[CheckResult]:
    """Compare DDP's gradients between ranks (bitwise) and with one process's (within LIMIT)."""
    # TF32 keeps 10 bits of a float32's mantissa: the tolerance it needs would hide a real error.
    torch.set_float32_matmul_precision("highest")
    # Drawn on the CPU: the same weights and tokens on every rank and device.
    torch.manual_seed(SEED)
    model = Transformer().to(ranks.device)
    tokens = torch.randint(VOCABULARY, (BATCH * ranks.world_size, SEQ_LEN + 1)).to(ranks.device)
    share = tokens[ranks.rank * BATCH : (ranks.rank + 1) * BATCH]

    alone = {name: gradient.clone() for name, gradient in named_gradients(model, tokens).items()}
    device_ids = [ranks.device] if ranks.device.type == "cuda" else None
    together = named_gradients(DistributedDataParallel(model, device_ids, bucket_cap_mb=BUCKET_MB), share)

    digests = {name: digest(gradient) for name, gradient in together.items()}
    errors = {name: relative_error(gradient, alone[name]) for name, gradient in together.items()}
    norms = {name: gradient.double().norm().item() for name, gradient in alone.items()}
    answers = ranks.gather("gradients", {"digests": digests, "errors": errors, "norms": norms})
    return [
        equal_on_all_ranks([answer["digests"] for answer in answers]),
        _equal_to_one_process([answer["errors"] for answer in answers], [answer["norms"] for answer in answers]),
    ]


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes: equal digests mean equal bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference of an element, as a share of the reference's largest element."""
    scale = reference.abs().max().item()
    difference = (value - reference).abs().max().item()
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / scale)


def equal_on_all_ranks(digests: list[dict[str, str]]) -> CheckResult:
    """Count (rank, tensor) pairs whose bits differ from most ranks' (from rank 0's without a majority)."""
    odd = []
    for tensor in digests[0]:
        usual = Counter(own[tensor] for own in digests).most_common(1)[0][0]
        odd += [(rank, tensor) for rank, own in enumerate(digests) if own[tensor] != usual]
    return CheckResult(
        name="gradients_equal_on_all_ranks",
        value=len(odd),
        unit="tensors",
        limit=0,
        must_be="at_most",
        note=_describe(odd, "has other bits than the other ranks in"),
        details={
            "tensors": len(digests[0]),
            "ranks": len(digests),
            "odd_ranks": sorted({rank for rank, _ in odd}),
            "different": [list(pair) for pair in odd[:20]],
        },
    )


def miscomputing(norms: list[dict[str, float]]) -> list[int]:
    """Ranks whose own gradients, without communication, have another norm than the median rank's."""
    # The median would lose its order with NaN in it.
    finite = {name: [own[name] for own in norms if math.isfinite(own[name])] for name in norms[0]}
    usual = {name: statistics.median(values or [math.nan]) for name, values in finite.items()}
    # "not <=" so that NaN counts as an error.
    return [
        rank
        for rank, own in enumerate(norms)
        if any(not abs(own[name] - norm) <= LIMIT * norm for name, norm in usual.items())
    ]


def _equal_to_one_process(errors: list[dict[str, float]], norms: list[dict[str, float]]) -> CheckResult:
    # "not <=" so that NaN counts as an error.
    wrong = [(rank, name) for rank, own in enumerate(errors) for name, error in own.items() if not error <= LIMIT]
    all_errors = [error for own in errors for error in own.values()]
    worst = max(all_errors) if all(error == error for error in all_errors) else float("nan")
    return CheckResult(
        name="gradients_equal_one_process",
        value=worst,
        unit="relative error",
        limit=LIMIT,
        must_be="at_most",
        note=_describe(wrong, "differs from a single process in"),
        details={
            # A rank that computes wrongly spoils every rank's sum.
            "odd_ranks": miscomputing(norms) or sorted({rank for rank, _ in wrong}),
            "wrong": [list(pair) for pair in wrong[:20]],
        },
    )


def _describe(pairs: list[tuple[int, str]], verb: str) -> str:
    if not pairs:
        return ""
    rank, tensor = pairs[0]
    more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    return f"rank {rank} {verb} {tensor}{more}"
