"""Four ranks of test_stragglers.py in one process group: a loop of the user's own, with slowed ranks.

``-m tests.training.straggler_ranks OUT.json``: the slowest rank that each phase's ledger has, by the phase's name.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bootstrap.contract.ledger import LEDGER_FILE
from bootstrap.training import SpotTolerantRun, stragglers

# Long beside the scatter of a busy machine.
USUAL_S, SLOW_S = 0.04, 0.25
STEPS = 16


class Slow(nn.Module):
    """Layer of a rank's own speed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.part, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        result: torch.Tensor = self.part(values)
        return result


def own_loop(name: str, slowed: Collection[int], *, sharded: bool = False, input_s: float = 0.0) -> None:
    is_slow = dist.get_rank() in slowed
    layers = [Slow(SLOW_S if is_slow and not input_s else USUAL_S) for _ in range(2)]
    model: nn.Module = nn.Sequential(*layers)
    if sharded:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with SpotTolerantRun(model, optimizer, dataset_size=64, global_batch=8, store=name, agree_every=1) as run:
        for _ in run.steps(STEPS):
            time.sleep(input_s if is_slow else 0)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stragglers.WINDOW_S = 0.3
    own_loop("equal", ())
    own_loop("all slow", range(4))
    own_loop("replicated", [2])
    own_loop("sharded", [3], sharded=True)
    own_loop("input", [1], input_s=SLOW_S)
    if dist.get_rank() == 0:
        found: dict[str, Any] = {}
        for ledger in Path().glob(f"*/{LEDGER_FILE}"):
            events = [json.loads(line) for line in ledger.read_text().splitlines() if "slowest" in line]
            found[ledger.parent.name] = events[-1]["slowest"]
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
