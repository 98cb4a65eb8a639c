"""Ranks of test_trainer.py: the same steps in each layout, or one run that is short of memory.

``-m tests.training.trainer_ranks LAYOUTS.json OUT.json``: flags by name of the layout; losses by name.
``-m tests.training.trainer_ranks --room SAMPLES FLAGS...``: the trainer, where rank 1 runs out of memory on larger
micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bootstrap.trainer import __main__, loop
from bootstrap.trainer.config import parse_config
from bootstrap.trainer.run import assemble, open_samples, set_device
from bootstrap.training.sample_order import SampleOrder

STEPS = 3


def losses(flags: list[str]) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps, an evaluation after them, and FSDP2's collectives of a step."""
    config = parse_config(flags, {})
    device = set_device(config)
    parts = assemble(config, device)
    config = parts.config
    data = open_samples(config, image_size=32)
    order = SampleOrder(dataset_size=len(data), global_batch=config.global_batch, seed=config.seed)

    def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
        indices = order.indices(step, rank=parts.data_rank, world_size=parts.data_size)
        for part in torch.split(indices, config.micro_batch):
            yield data.batch(part, device, step=step)

    with _Calls() as calls:
        results = [parts.stepper.step(batches(0))]
    results += [parts.stepper.step(batches(step)) for step in range(1, STEPS)]
    return {
        "loss": [float(result.loss) for result in results],
        "norm": [float(result.gradient_norm) for result in results],
        "evaluation": [float(parts.stepper.evaluate(batches(STEPS)))],
        "gathers": [calls.counts[torch.ops.c10d._allgather_base_.default]],
        "reductions": [calls.counts[torch.ops.c10d._reduce_scatter_base_.default]],
        "held": [sum(_held_bytes(parameter) for parameter in parts.model.parameters())],
    }


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def _held_bytes(parameter: torch.Tensor) -> float:
    return float(getattr(parameter, "_local_tensor", parameter).nbytes)


def run_short_of_memory(room: int, flags: list[str]) -> None:
    module: Any = loop
    whole = module.cross_entropy

    def cross_entropy(logits: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        # Rank 0 goes on into a collective that never ends.
        if len(logits) > room and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory, the test says")
        loss: torch.Tensor = whole(logits, *arguments, **settings)
        return loss

    module.cross_entropy = cross_entropy
    sys.argv[1:] = flags
    __main__.main()


def measure_each(measure: Callable[[list[str]], Any]) -> None:
    """Join the ranks, measure the flags of each name in the file of argument 1, write the results to argument 2."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    named = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = {name: measure(flags) for name, flags in named.items()}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1] == "--room":
        run_short_of_memory(int(sys.argv[2]), sys.argv[3:])
        return
    measure_each(losses)


if __name__ == "__main__":
    main()
