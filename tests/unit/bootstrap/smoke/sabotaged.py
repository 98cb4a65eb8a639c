"""The smoke test with one fault put in: ``sabotaged.py FAULT [arguments of bootstrap.smoke]``.

Under torchrun, ``sabotaged.py FAULT,FAULT,... --out FOLDER`` runs it once a fault in the same ranks, as their start is
most of a run: FOLDER gets each report, FAULT.json, and what each rank would exit with, FAULT.RANK.code.

The faults replace functions of the product in this process alone, so the product has no switch that could be left on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.smoke import bandwidth, cli, gradients, ranks, supervisor, worker

# Set by torchrun and by the supervisor; absent in the supervisor itself.
RANK = os.environ.get("RANK")
TENSOR = "blocks.0.qkv.weight"


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
    if RANK == "1":
        change_gradients(lambda gradient: gradient.view(-1)[7].add_(1e-3))  # type: ignore[arg-type]


def nan_gradient() -> None:
    """Every rank has the same NaN, so the ranks agree."""
    change_gradients(lambda gradient: gradient.view(-1)[7].fill_(float("nan")))  # type: ignore[arg-type]


def no_all_reduce() -> None:
    """DDP does not synchronise: every rank keeps its own gradients."""
    original = gradients.named_gradients

    def unsynchronised(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                return original(model, tokens)
        return original(model, tokens)

    gradients.named_gradients = unsynchronised


def wrong_sum() -> None:
    """On rank 1 an all-reduce leaves one element wrong."""
    original = dist.all_reduce

    def corrupting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = original(tensor, *arguments, **options)
        tensor[5] += 1
        return work

    if RANK == "1":
        dist.all_reduce = corrupting


def diverging_parameters() -> None:
    """Rank 1's optimizer does something else than rank 0's."""
    original = torch.optim.AdamW

    def other(*arguments: Any, **options: Any) -> torch.optim.AdamW:
        return original(*arguments, **{**options, "lr": 2e-3})

    if RANK == "1":
        torch.optim.AdamW = other  # type: ignore[misc, assignment]


def slow_together() -> None:
    """With DDP rank 1 takes 0.5 s longer a step than alone, as over a network that fell back to TCP."""
    original = DistributedDataParallel.forward

    def slow(self: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return original(self, *arguments, **options)  # type: ignore[no-untyped-call]

    if RANK == "1":
        DistributedDataParallel.forward = slow  # type: ignore[method-assign]


def instead_of_bandwidth(what: Callable[[], object]) -> None:
    """Rank 1 does ``what`` where the all-reduce test would begin."""
    if RANK == "1":
        bandwidth.check = lambda *_, **__: what()  # type: ignore[assignment]


def fail() -> None:
    """An exception of rank 1."""
    raise ValueError("a reason of rank 1's own")


FAULTS: dict[str, Callable[[], None]] = {
    "perturbed_gradient": perturbed_gradient,
    "nan_gradient": nan_gradient,
    "no_all_reduce": no_all_reduce,
    "wrong_sum": wrong_sum,
    "diverging_parameters": diverging_parameters,
    "slow_together": slow_together,
    "dies": lambda: instead_of_bandwidth(lambda: os._exit(7)),
    "is_killed": lambda: instead_of_bandwidth(lambda: os.kill(os.getpid(), 9)),
    "hangs": lambda: instead_of_bandwidth(lambda: time.sleep(600)),
    "raises": lambda: instead_of_bandwidth(fail),
}


def one_after_another(faults: list[str], arguments: list[str], folder: Path) -> None:
    """Run the smoke test once a fault: each run joins the group of the first and leaves it to the next."""
    place = ranks.join("cpu", timeout_s=worker.COLLECTIVE_TIMEOUT_S)
    leave = place.leave
    ranks.join = lambda *_, **__: place
    place.leave = lambda: None  # type: ignore[method-assign]
    for fault in faults:
        originals = [(owner, name, getattr(owner, name)) for owner, name in REPLACED]
        FAULTS[fault]()
        code = cli.main([*arguments, "--out", str(folder / f"{fault}.json")])
        (folder / f"{fault}.{RANK}.code").write_text(str(code), encoding="utf-8")
        for owner, name, original in originals:
            setattr(owner, name, original)
    leave()


# Functions that the consecutive faults replace.
REPLACED: list[tuple[Any, str]] = [(gradients, "named_gradients"), (dist, "all_reduce"), (torch.optim, "AdamW")]

if __name__ == "__main__":
    first, *others = sys.argv[1].split(",")
    if others:
        *given, option, out = sys.argv[2:]
        assert option == "--out"
        one_after_another([first, *others], given, Path(out))
    else:
        FAULTS[first]()
        supervisor.RANK_PROGRAM = (__file__, first)
        sys.exit(cli.main(sys.argv[2:]))
