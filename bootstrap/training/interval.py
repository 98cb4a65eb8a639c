"""How often to checkpoint."""

from __future__ import annotations

import math


def young_daly_interval_s(*, stall_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Seconds between checkpoints that lose the least time to checkpointing and recomputation, √(2·stall·MTBF).

    First order in stall/MTBF: J. W. Young, CACM 17(9), 1974, https://doi.org/10.1145/361147.361115; J. T. Daly, FGCS
    22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016.

    Args:
        stall_s: seconds one checkpoint stops training.
        mtbf_s: mean seconds between interruptions of the whole run.
        write_s: seconds the background write takes; a shorter interval would only queue writes.

    Raises:
        ValueError: a value out of range.
    """
    if not (stall_s >= 0 and write_s >= 0 and mtbf_s > 0):
        raise ValueError(f"stall_s {stall_s} and write_s {write_s} must be >= 0 and mtbf_s {mtbf_s} > 0")
    return max(math.sqrt(2 * stall_s * mtbf_s), write_s)
