"""Ranks of test_trainer.py: train the same steps in each layout given, and write the losses.

``torchrun --nproc-per-node 4 -m tests.training.trainer_layouts LAYOUTS.json OUT.json``: flags by name of the layout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bootstrap.trainer.config import parse_config
from bootstrap.trainer.data import open_dataset
from bootstrap.trainer.run import assemble, set_device

STEPS = 3


def losses(flags: list[str]) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps, and an evaluation behind them."""
    config = parse_config(flags, {})
    device = set_device(config)
    assembled = assemble(config, device)
    config, stepper = assembled.config, assembled.stepper
    vocab = config.architecture.get("vocab_size", 0)
    data = open_dataset("", family=config.family, seq_len=config.seq_len, vocab_size=vocab, image_size=32, classes=10)
    each = config.global_batch // assembled.data_size

    def batches(step: int):
        first = step * config.global_batch + assembled.data_rank * each
        for indices in torch.arange(first, first + each).split(config.micro_batch):
            yield data.batch(indices, device, step=step)

    results = [stepper.step(batches(step)) for step in range(STEPS)]
    return {
        "loss": [float(result.loss) for result in results],
        "norm": [float(result.gradient_norm) for result in results],
        "evaluation": [float(stepper.evaluate(batches(STEPS)))],
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for name, flags in json.loads(Path(sys.argv[1]).read_text(encoding="ascii")).items():
        found[name] = losses(flags)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
