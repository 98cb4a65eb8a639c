"""Running costs: prices of everything a fleet pays besides its nodes, and the drain reserve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bootstrap.contract.timings import seconds_to_end
from optimizer.catalog import Catalog
from optimizer.catalog.region_transfer import transfer_usd
from optimizer.contract.plan import INTERFACE_ENDPOINTS, PlannedJob, Volumes
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.economics.checkpoint import checkpoint_usd
from optimizer.performance.types import Floats

# gp3's included performance (https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html#gp3-performance).
GP3_INCLUDED_IOPS = 3000
GP3_INCLUDED_MIB_PER_S = 125


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCosts:
    """Prices in one region: volumes of one node, all storage with its key, endpoints, controller."""

    volume_usd_per_month: float
    storage_usd_per_month: float
    endpoints_usd_per_hour: float
    controller_usd_per_hour: float
    data_usd_per_month: float  # of the data in S3, part of all storage
    lustre_usd_per_month: float  # of the data's file system, likewise
    read_request_usd: float  # 0 without data
    data_region: str | None  # None for the same region
    carry_usd: float  # for one copy of the data out of its bucket's region; 0 in the same region
    checkpoint_usd: float  # of one checkpoint that is pruned later


def running_costs(
    catalog: Catalog,
    region: str,
    checkpoint_gib: float,
    *,
    data_gib: float = 0.0,
    data_region: str | None = None,
    lustre_gib: int = 0,
) -> RunningCosts:
    """Look up a region's running costs.

    Args:
        data_gib: training data in S3, in ``data_region``.
        lustre_gib: storage of a Lustre file system; 0 for none.
    """
    volumes, kept = Volumes(), PlannedJob.model_fields["checkpoints_kept"].default
    s3_usd = catalog.unit_price("s3-standard-storage", region).usd
    lustre_usd = lustre_gib * catalog.unit_price("lustre-storage", region).usd if lustre_gib else 0.0
    return RunningCosts(
        volume_usd_per_month=volumes.root_gib * catalog.unit_price("gp3-storage", region).usd
        + (volumes.iops - GP3_INCLUDED_IOPS) * catalog.unit_price("gp3-iops", region).usd
        + (volumes.throughput_mib_per_s - GP3_INCLUDED_MIB_PER_S) * catalog.unit_price("gp3-throughput", region).usd,
        storage_usd_per_month=(checkpoint_gib * kept + data_gib) * s3_usd
        + catalog.unit_price("kms-key", region).usd
        + lustre_usd,
        endpoints_usd_per_hour=len(INTERFACE_ENDPOINTS) * catalog.unit_price("vpc-endpoint", region).usd,
        controller_usd_per_hour=controller_usd_per_hour(catalog, region),
        data_usd_per_month=s3_usd * data_gib,
        lustre_usd_per_month=lustre_usd,
        read_request_usd=catalog.unit_price("s3-read-request", region).usd if data_gib else 0.0,
        data_region=data_region if data_region != region else None,
        carry_usd=transfer_usd(data_gib, data_region, region),
        checkpoint_usd=checkpoint_usd(catalog, region, checkpoint_gib),
    )


# infra/controller.py, priced as if each run took its time limit; a test compares.
RUNS_PER_HOUR = 60
RUN_LIMIT_S = 55
MEMORY_GIB = 0.25
METRICS = 10
# In the order of a plan's prices.
CONTROLLER_ITEMS = ("lambda-request", "lambda-compute", "custom-metric", "metric-request")


def controller_usd_per_hour(catalog: Catalog, region: str) -> float:
    """List price of the controller, USD an hour, without free allowances."""
    usd = {item: catalog.unit_price(item, region).usd for item in CONTROLLER_ITEMS}
    hourly = RUNS_PER_HOUR * (
        usd["lambda-request"] + RUN_LIMIT_S * MEMORY_GIB * usd["lambda-compute"] + usd["metric-request"]
    )
    return hourly + METRICS * usd["custom-metric"] / HOURS_PER_MONTH


_seconds_to_end = np.frompyfunc(seconds_to_end, 3, 1)


def reserve_hours(step_time_s: ArrayLike, checkpoint_gib: ArrayLike, writers: ArrayLike) -> Floats:
    """Drain reserve of many fleets, hours."""
    return np.asarray(_seconds_to_end(step_time_s, checkpoint_gib, writers), dtype=float) / 3600
