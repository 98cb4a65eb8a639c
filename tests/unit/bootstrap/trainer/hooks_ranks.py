"""One of two ranks that train a small model with each compression, and resume PowerSGD from its state."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer.hooks import compress_gradients
from bootstrap.training.leaving import end_process
from bootstrap.training.state import Stateful

STEPS = 60


class Training:
    """Regression of a fixed linear map; gradients of rank above 2, so that PowerSGD leaves errors."""

    def __init__(self, compression: str) -> None:
        torch.manual_seed(0)
        self.target = torch.randn(24, 16)
        # The first bucket takes 1 MiB, so there are two.
        layers = nn.Sequential(nn.Linear(24, 550), nn.Tanh(), nn.Linear(550, 550), nn.Tanh(), nn.Linear(550, 16))
        self.model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        self.extra: dict[str, Stateful] = compress_gradients(
            self.model, compression, precision="fp32", steps=STEPS, warmup_steps=4
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def rehearse(self) -> None:
        self.model(torch.zeros(4, 24)).sum().backward()
        self.optimizer.zero_grad()

    def step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        x = torch.randn(32, 24, generator=generator)
        loss = (self.model(x) - x @ self.target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **self.extra}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, part in self.extra.items():
            part.load_state_dict(state[name])


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    losses = {}
    for compression in ("none", "bf16", "fp16", "powersgd-2"):
        training = Training(compression)
        losses[compression] = [training.step(step) for step in range(STEPS)]

    through, resumed = Training("powersgd-2"), Training("powersgd-2")
    through.rehearse()
    for step in range(20):
        through.step(step)
    errors = [error.clone() for error in through.extra["powersgd"]._state.error_dict.values()]  # type: ignore[attr-defined]
    saved = through.state()
    means = list(saved["powersgd"]["errors"].values())
    assert len(means) > 1 and any(not torch.equal(error, mean) for error, mean in zip(errors, means, strict=True))
    for error, mean in zip(errors, means, strict=True):
        dist.all_reduce(error)
        assert torch.allclose(error / 2, mean)
    resumed.rehearse()
    resumed.load(saved)
    for step in range(20, 30):
        assert through.step(step) == resumed.step(step), f"step {step}"
    if dist.get_rank() == 0:
        out.write_text(json.dumps(losses))
    dist.barrier()
    end_process(0)  # a group that a model still holds would be torn down while Python exits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
