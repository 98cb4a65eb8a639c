"""Training that survives an interruption: a few lines around your own loop.

with SpotTolerantRun(model, optimizer, dataset_size=len(data), global_batch=64) as run:
    for step in run.steps(total_steps):
        batch = data[run.sample_indices(step)]
        ...  # forward, backward, optimizer.step()

Names load on first use, so ``python -m bootstrap.training.ledger`` works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootstrap.training.errors import Interrupted
    from bootstrap.training.run import SpotTolerantRun
    from bootstrap.training.watcher import Watcher

__all__ = ["Interrupted", "SpotTolerantRun", "Watcher"]
_MODULES = {"Interrupted": "errors", "SpotTolerantRun": "run", "Watcher": "watcher"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
