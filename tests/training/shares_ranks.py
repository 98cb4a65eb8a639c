"""Ranks of test_shares.py: a loop of the user's own and the trainer, with unequal shares, in one process group.

``-m tests.training.shares_ranks PHASES.json OUT.json``: flags, checkpoint folder and slowed rank of each trainer run.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bootstrap.trainer import loop, run
from bootstrap.trainer.config import parse_config
from bootstrap.training import SpotTolerantRun
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.stores import open_store

SLOW_S = 0.06
SAMPLES, BATCH, STEPS = 100, 12, 6


def own_loop(folder: Path, shares: list[list[int] | None]) -> dict[str, Any]:
    """Mean loss of each rank times gradient_weight; the i-th shares from step i on, every second with a new start."""
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, 8)
    indices: list[list[int]] = []
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.05)
    for start in range(0, STEPS, 2):
        if start:
            nn.init.zeros_(first.weight)  # the checkpoint has the weights
        with SpotTolerantRun(
            replica, optimizer, dataset_size=SAMPLES, global_batch=BATCH, shares=shares[start], store=str(folder)
        ) as spot:
            for step in spot.steps(start + 2):
                spot.set_shares(shares[step])
                mine = spot.sample_indices(step)
                every: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(every, mine.tolist())
                indices.append([index for part in every for index in part])
                optimizer.zero_grad()
                loss = (replica(data[mine]) - data[mine].sum(1, keepdim=True)).square().mean()
                (loss * spot.gradient_weight).backward()
                optimizer.step()
    order = SampleOrder(dataset_size=SAMPLES, global_batch=BATCH, seed=0)
    assert indices == [order.indices(step).tolist() for step in range(STEPS)]
    return {"parameters": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()}


def refused(shares: list[int] | None) -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    try:
        SpotTolerantRun(
            model, torch.optim.SGD(model.parameters()), dataset_size=9, global_batch=6, shares=shares, store="refused"
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def trainer(flags: list[str], checkpoints: str, slow_rank: int | None) -> None:
    module: Any = loop
    whole = module.cross_entropy

    def cross_entropy(*arguments: Any, **settings: Any) -> torch.Tensor:
        time.sleep(SLOW_S)
        loss: torch.Tensor = whole(*arguments, **settings)
        return loss

    if dist.get_rank() == slow_rank:
        module.cross_entropy = cross_entropy
    config = parse_config(flags, {})
    parts = run.assemble(config, run.set_device(config))
    held_out = run.open_samples(config, "val") if config.evaluate_every else None
    run.train_assembled(parts, open_store(checkpoints), run.open_samples(config), held_out)
    module.cross_entropy = whole


def main() -> None:
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loops = {
        "equal": own_loop(Path("equal"), [None] * STEPS),
        "unequal": own_loop(Path("unequal"), [[6, 5, 1], [6, 5, 1], [1, 1, 10], [4, 4, 4], None, [10, 1, 1]]),
    }
    errors = [refused([1, 2, 3] if rank else [2, 1, 3])]
    for phase in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        trainer(phase["flags"], phase["checkpoints"], phase["slow_rank"])
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"loops": loops, "errors": errors}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
