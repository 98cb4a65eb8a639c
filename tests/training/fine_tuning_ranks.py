"""Ranks of test_fine_tuning.py: steps of several methods on one batch, which every method can learn.

``-m tests.training.fine_tuning_ranks FLAGS.json OUT.json``: flags by name; losses and changed parameters by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bootstrap.trainer.config import parse_config
from bootstrap.trainer.run import assemble, set_device
from bootstrap.training.state import plain_name, unwrap

STEPS = 6


def train(flags: list[str]) -> dict[str, Any]:
    config = parse_config(flags, {})
    parts = assemble(config, set_device(config))
    model = unwrap(parts.model)
    before = {name: _part(parameter).clone() for name, parameter in model.named_parameters()}
    tokens = torch.arange(parts.config.micro_batch * 33).reshape(-1, 33) % 7
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    losses = [float(parts.stepper.step([dict(batch)]).loss) for _ in range(STEPS)]
    return {
        "losses": losses,
        "changed": [
            plain_name(name) for name, parameter in model.named_parameters() if not _part(parameter).equal(before[name])
        ],
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
    }


def _part(parameter: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return part.detach()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {name: train(flags) for name, flags in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items()}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
