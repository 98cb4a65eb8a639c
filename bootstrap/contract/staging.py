"""Numbers of the copy of training data from S3 to a node's disk, which the optimizer plans with."""

from __future__ import annotations

import math

# Requests at a time: whole small files, or pieces of large ones.
THREADS = 64
# Connections of the pieces; each reads and writes S3 in parts of PART_BYTES.
CONNECTIONS = 128
PART_BYTES = 16 * 2**20
# Disk space that stays free for checkpoints on their way and logs.
RESERVE_BYTES = 2 * 2**30
# For a copy whose time nobody planned: 1.1 TB at the 5 Gbit/s of a g5.2xlarge.
LIMIT_S = 1800


def limit_s(planned_s: float) -> int:
    """Time after which a node's copy counts as hung, s: twice the planned, as S3 or a disk may be slower."""
    return max(LIMIT_S, math.ceil(2 * planned_s))
