"""The smoke test with faults put in, many in one start of torch, which is most of a run.

Under torchrun, ``sabotaged.py FAULT,FAULT,... FOLDER [arguments]`` runs one fault after another in the same
ranks: FOLDER gets each report, FAULT.json, and what each rank would exit with, FAULT.RANK.code.

The faults replace functions of the product in these processes alone: the product has no switch that could be left on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch._dynamo  # DDP imports it at its first use
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke import bandwidth, gang, gradients, ranks

TENSOR = "layers.layers.0.linear1.weight"


def is_rank_1() -> bool:
    """Tell whether torchrun made this process its second rank."""
    return os.environ.get("RANK") == "1"


def change_gradients(change: Callable[[torch.Tensor], None]) -> None:
    """Apply ``change`` to one gradient after the DDP backward."""
    original = gradients.named_gradients

    def changed(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        result = original(model, tokens)
        if isinstance(model, DistributedDataParallel):
            change(result[TENSOR])
        return result

    gradients.named_gradients = changed


def perturbed_gradient() -> None:
    """Rank 1's gradient of one tensor is a little off, as after a bit flip."""
    if is_rank_1():
        change_gradients(lambda gradient: gradient.view(-1)[7].add_(1e-3))  # type: ignore[arg-type]


def nan_gradient() -> None:
    """Every rank has the same NaN, so the ranks agree."""
    change_gradients(lambda gradient: gradient.view(-1)[7].fill_(float("nan")))  # type: ignore[arg-type]


def wrong_sum() -> None:
    """On rank 1 an all-reduce leaves one element wrong."""
    original = dist.all_reduce

    def corrupting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = original(tensor, *arguments, **options)
        tensor[5] += 1
        return work

    if is_rank_1():
        dist.all_reduce = corrupting


def raises() -> None:
    """Rank 1 fails where the all-reduce test would begin."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a reason of rank 1's own")

    if is_rank_1():
        bandwidth.check = fail  # type: ignore[assignment]


FAULTS: dict[str, Callable[[], None]] = {
    "perturbed_gradient": perturbed_gradient,
    "nan_gradient": nan_gradient,
    "wrong_sum": wrong_sum,
    "raises": raises,
}


def one_after_another(faults: list[str], arguments: list[str], folder: Path) -> None:
    """Run the smoke test once a fault: each run joins the group of the first and leaves it to the next."""
    place = ranks.meet("cpu", timeout_s=gang.COLD_JOIN_S)
    ranks.connect(place, timeout=place.timeout)
    leave = place.leave
    ranks.meet = lambda *_, **__: place
    ranks.connect = lambda *_, **__: None
    place.leave = lambda: None  # type: ignore[method-assign]
    for fault in faults:
        originals = [(owner, name, getattr(owner, name)) for owner, name in REPLACED]
        FAULTS[fault]()
        code = cli.main([*arguments, "--out", str(folder / f"{fault}.json")])
        (folder / f"{fault}.{place.rank}.code").write_text(str(code), encoding="utf-8")
        for owner, name, original in originals:
            setattr(owner, name, original)
    leave()


# Functions that the consecutive faults replace.
REPLACED: list[tuple[Any, str]] = [(gradients, "named_gradients"), (dist, "all_reduce")]

if __name__ == "__main__":
    faults, folder, *given = sys.argv[1:]
    one_after_another(faults.split(","), given, Path(folder))
