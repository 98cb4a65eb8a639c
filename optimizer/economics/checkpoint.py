"""Checkpoints: size, stall, time to be stored, dollars and interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bootstrap.contract.checkpoint import PRUNED_DAYS
from bootstrap.contract.fine_tuning import EIGHT_BIT
from bootstrap.contract.staging import PART_BYTES
from bootstrap.contract.timings import seconds_to_store
from optimizer.catalog import Catalog
from optimizer.contract.units import GIB, HOURS_PER_MONTH
from optimizer.performance.case import OPTIMIZERS
from optimizer.performance.types import Floats

# Frameworks whose runs checkpoint by bootstrap.training: every GPU copies its part beside the next step, and a thread
# writes. 6.95 GiB a GPU took 0.14 s of copying and made all steps together 0.02 to 0.13 s longer (two H100, 2026-11-25,
# tests/benchmarks/results/checkpoint_2xh100_202611.md). The speed is half of that copy's: PCIe 4 is half as fast.
OWN_FRAMEWORKS = frozenset({"gpufleet", "torch", "torchvision"})
COPY_GIB_PER_S_PER_GPU = 24.5
# Other engines: torch.distributed.checkpoint saves 15 GiB on one node of four H200 in 7.4 s, in sync (measured 2026).
SAVE_GIB_PER_S_PER_NODE = 15 / 7.4

# A user's own bug loses at most this much work.
MAX_INTERVAL_S = 3600.0
# A shorter interval is mostly the overhead of starting to save.
MIN_INTERVAL_S = 60.0

# Noncurrent days end at the next midnight UTC, half a day later on average:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/intro-lifecycle-rules.html (how the days are calculated)
_MIDNIGHT_DAYS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTimes:
    """Checkpoints of fleets, one an element.

    Attributes:
        stall_s: seconds for which a checkpoint stops the training.
        save_s: seconds from the step until its checkpoint is stored and counts, beyond the stall.
        usd: S3's price of a checkpoint that is pruned later.
    """

    stall_s: Floats
    save_s: Floats
    usd: Floats


def checkpoint_gib(parameters: int, optimizer: str, *, pure: bool = False) -> float:
    """Size of one checkpoint, GiB: trained parameters and optimizer state, in 16 bits with ``pure``, else 32."""
    state_bytes = OPTIMIZERS[optimizer][0]
    if pure:
        state_bytes *= 1.0 if optimizer == EIGHT_BIT else 0.5
    return parameters * ((2.0 if pure else 4.0) + state_bytes) / GIB


def checkpoints(
    gib: float, framework: str, *, nodes: ArrayLike, gpus_per_node: ArrayLike, writers: ArrayLike, usd: ArrayLike
) -> CheckpointTimes:
    """Checkpoints of ``gib`` GiB; of an engine other than bootstrap.training ``writers`` nodes write together."""
    nodes, gpus = np.asarray(nodes, dtype=float), np.asarray(gpus_per_node, dtype=float)
    prices = np.asarray(usd, dtype=float)
    if framework in OWN_FRAMEWORKS:
        # Replicated states are divided over all ranks too.
        return CheckpointTimes(
            stall_s=gib / (COPY_GIB_PER_S_PER_GPU * nodes * gpus),
            save_s=np.asarray(seconds_to_store(gib, 1) / nodes),
            usd=prices,
        )
    stall = gib / (SAVE_GIB_PER_S_PER_NODE * np.asarray(writers, dtype=float))
    return CheckpointTimes(stall_s=stall, save_s=np.zeros_like(stall), usd=prices)


def checkpoint_usd(catalog: Catalog, region: str, gib: float) -> float:
    """Price of one checkpoint that is written and pruned: requests by part, and storage until it is gone for good."""
    requests = math.ceil(gib * GIB / PART_BYTES)
    months = (PRUNED_DAYS + _MIDNIGHT_DAYS) * 24 / HOURS_PER_MONTH
    stored_usd = gib * months * catalog.unit_price("s3-standard-storage", region).usd
    return stored_usd + requests * catalog.unit_price("s3-write-request", region).usd


def interval_s(saves: CheckpointTimes, rate_per_hour: ArrayLike, usd_per_hour: ArrayLike) -> Floats:
    """Checkpoint interval that loses least, s; at least two stalls, and the time until the one before is stored.

    Young 1974 and Daly 2006 (https://doi.org/10.1016/j.future.2004.11.016), with a checkpoint's dollars as the time for
    which the fleet runs for them; a fleet whose hour costs nothing counts time alone.
    """
    usd_per_s = np.asarray(usd_per_hour, dtype=float) / 3600.0
    paid_s = np.divide(saves.usd, usd_per_s, out=np.zeros_like(usd_per_s), where=usd_per_s > 0)
    optimum = np.sqrt(2 * (saves.stall_s + paid_s) * 3600.0 / np.asarray(rate_per_hour, dtype=float))
    least = np.maximum(MIN_INTERVAL_S, np.maximum(2 * saves.stall_s, saves.save_s))
    return np.asarray(np.clip(optimum, least, np.maximum(MAX_INTERVAL_S, least)), dtype=float)
