"""Checkpoints: size, stall and interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bootstrap.contract.fine_tuning import EIGHT_BIT
from optimizer.performance.inputs_builder import OPTIMIZERS
from optimizer.performance.types import Floats
from optimizer.units import GIB

# torch.distributed.checkpoint, synchronous save of 15 GiB on one node of four H200: 7.4 s (measured 2026).
SAVE_GIB_PER_S_PER_NODE = 15 / 7.4

# The most a user can lose to their own bug.
MAX_INTERVAL_S = 3600.0
# Below, it is mostly the overhead of starting to save.
MIN_INTERVAL_S = 60.0


def checkpoint_gib(parameters: int, optimizer: str, *, pure: bool = False) -> float:
    """Size of one checkpoint, GiB: trained parameters and the optimizer's state; ``pure``: in 16 bits, not 32."""
    state_bytes = OPTIMIZERS[optimizer][0]
    if pure:
        state_bytes *= 1.0 if optimizer == EIGHT_BIT else 0.5
    return parameters * ((2.0 if pure else 4.0) + state_bytes) / GIB


def stall_s(checkpoint_gib: ArrayLike, writers: ArrayLike) -> Floats:
    """Stall of one checkpoint that ``writers`` nodes write together, s."""
    return np.asarray(checkpoint_gib, dtype=float) / (SAVE_GIB_PER_S_PER_NODE * np.asarray(writers, dtype=float))


def interval_s(stall: ArrayLike, rate_per_hour: ArrayLike) -> Floats:
    """Checkpoint interval that loses least, s; at least two stalls.

    Young 1974 and Daly 2006 (https://doi.org/10.1016/j.future.2004.11.016).
    """
    stall = np.asarray(stall, dtype=float)
    optimum = np.sqrt(2 * stall * 3600.0 / np.asarray(rate_per_hour, dtype=float))
    least = np.maximum(MIN_INTERVAL_S, 2 * stall)
    return np.asarray(np.clip(optimum, least, np.maximum(MAX_INTERVAL_S, least)), dtype=float)
