"""Numbers of the copy of training data from S3 to a node's disk, which the optimizer plans with."""

from __future__ import annotations

import math
import re

# Requests at a time: whole small files, or pieces of large ones.
THREADS = 64
# Connections of the pieces; each reads and writes S3 in parts of PART_BYTES.
CONNECTIONS = 128
PART_BYTES = 16 * 2**20
# Disk space that stays free for checkpoints on their way and logs.
RESERVE_BYTES = 2 * 2**30
# Limit of a copy whose time is not in the plan: 1.1 TB at the 5 Gbit/s of a g5.2xlarge.
LIMIT_S = 1800


# A node's log line every PROGRESS_S of its copy.
PROGRESS = "data: %.2f of %.2f GiB, %d of %d files copied, %.0f MiB/s, %s left"
PROGRESS_S = 10.0


def copied_gib(line: str) -> float | None:
    """Read what a line of progress says is copied, GiB; None for any other line."""
    found = re.fullmatch(r"data: (\d+\.\d+) of .* files copied, .* left", line)
    return float(found[1]) if found else None


def limit_s(planned_s: float) -> int:
    """Time after which a node's copy counts as hung, s: twice the planned, as S3 or a disk may be slower."""
    return max(LIMIT_S, math.ceil(2 * planned_s))
