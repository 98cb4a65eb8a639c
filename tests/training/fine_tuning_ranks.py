"""Ranks of test_fine_tuning.py: steps of several methods on one batch, which every method can learn.

``-m tests.training.fine_tuning_ranks FLAGS.json OUT.json``: flags by name; losses and changed parameters by name.
"""

from __future__ import annotations

from typing import Any

import torch

from bootstrap.trainer.config import parse_config
from bootstrap.trainer.run import assemble, set_device
from bootstrap.training.forms import plain_name
from bootstrap.training.state import unwrap
from tests.training.trainer_ranks import measure_each

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


if __name__ == "__main__":
    measure_each(train)
