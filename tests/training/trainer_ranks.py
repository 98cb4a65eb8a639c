"""Ranks of test_trainer.py: the same steps in each layout, or one run that is short of memory.

``-m tests.training.trainer_ranks LAYOUTS.json OUT.json``: flags by name of the layout; losses by name.
``-m tests.training.trainer_ranks --methods FLAGS.json OUT.json``: the same of methods of fine-tuning.
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
from bootstrap.trainer.mesh import data_rank, data_size
from bootstrap.trainer.run import assemble, open_samples, set_device
from bootstrap.training.forms import plain_name
from bootstrap.training.sample_order import SampleOrder
from bootstrap.training.state import unwrap

STEPS, METHOD_STEPS = 3, 6


def losses(flags: list[str]) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps, an evaluation after them, and FSDP2's collectives of a step."""
    config = parse_config(flags, {})
    device = set_device(config)
    parts = assemble(config, device)
    config = parts.config
    data = open_samples(config, image_size=32)
    order = SampleOrder(dataset_size=len(data), global_batch=config.global_batch, seed=config.seed)

    def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
        indices = order.indices(step, rank=data_rank(parts.mesh), world_size=data_size(parts.mesh))
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
        "held": [sum(float(_held(parameter).nbytes) for parameter in parts.model.parameters())],
    }


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def _held(parameter: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return part.detach()


def steps_of_method(flags: list[str]) -> dict[str, Any]:
    """Losses of steps on one batch, which every method of fine-tuning can learn; parameters that change; types."""
    config = parse_config(flags, {})
    parts = assemble(config, set_device(config))
    model = unwrap(parts.model)
    before = {name: _held(parameter).clone() for name, parameter in model.named_parameters()}
    tokens = torch.arange(parts.config.micro_batch * 33).reshape(-1, 33) % 7
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    losses = [float(parts.stepper.step([dict(batch)]).loss) for _ in range(METHOD_STEPS)]
    return {
        "losses": losses,
        "changed": [
            plain_name(name) for name, parameter in model.named_parameters() if not _held(parameter).equal(before[name])
        ],
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
    }


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
    """Join the ranks, measure the flags of each name in a file, write the results to the last argument's."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    source, target = map(Path, sys.argv[-2:])
    named = json.loads(source.read_text(encoding="utf-8"))
    results = {name: measure(flags) for name, flags in named.items()}
    if dist.get_rank() == 0:
        target.write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1] == "--room":
        run_short_of_memory(int(sys.argv[2]), sys.argv[3:])
        return
    measure_each(steps_of_method if sys.argv[1] == "--methods" else losses)


if __name__ == "__main__":
    main()
