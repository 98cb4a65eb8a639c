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
    from bootstrap.training.errors import CheckpointError, Interrupted
    from bootstrap.training.run import SpotTolerantRun
    from bootstrap.training.stores import open_store
    from bootstrap.training.watcher import Watcher

__all__ = ["CheckpointError", "Interrupted", "SpotTolerantRun", "Watcher", "open_store"]

_MODULES = {
    "CheckpointError": "errors",
    "Interrupted": "errors",
    "SpotTolerantRun": "run",
    "Watcher": "watcher",
    "open_store": "stores",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
