"""Prices of everything a fleet pays besides its nodes: volumes, storage, endpoints, controller."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.catalog import Catalog
from optimizer.economics.controller import controller_usd_per_hour
from optimizer.economics.fleet_cost import GP3_INCLUDED_IOPS, GP3_INCLUDED_MIB_PER_S
from optimizer.plan import INTERFACE_ENDPOINTS, Job, Volumes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCosts:
    """Prices in one region, USD.

    Attributes:
        volume_usd_per_month: volumes of one node.
        storage_usd_per_month: the checkpoints that are kept, and the key that encrypts them.
        endpoints_usd_per_hour: all interface endpoints, in one zone.
        controller_usd_per_hour: the stack's controller.
    """

    volume_usd_per_month: float
    storage_usd_per_month: float
    endpoints_usd_per_hour: float
    controller_usd_per_hour: float


def running_costs(catalog: Catalog, region: str, checkpoint_gib: float) -> RunningCosts:
    """Look up a region's running costs, for checkpoints of ``checkpoint_gib``.

    Raises:
        DataMissingError: the catalog has no such price in any region.
    """
    return RunningCosts(
        volume_usd_per_month=volume_usd_per_month(catalog, region),
        storage_usd_per_month=storage_usd_per_month(catalog, region, checkpoint_gib),
        endpoints_usd_per_hour=endpoints_usd_per_hour(catalog, region),
        controller_usd_per_hour=controller_usd_per_hour(catalog, region),
    )


def volume_usd_per_month(catalog: Catalog, region: str) -> float:
    """The volumes of one node, USD a month."""
    v = Volumes()
    return (
        v.root_gib * catalog.unit_price("gp3-storage", region).usd
        + (v.iops - GP3_INCLUDED_IOPS) * catalog.unit_price("gp3-iops", region).usd
        + (v.throughput_mib_per_s - GP3_INCLUDED_MIB_PER_S) * catalog.unit_price("gp3-throughput", region).usd
    )


def storage_usd_per_month(catalog: Catalog, region: str, checkpoint_gib: float) -> float:
    """The checkpoints a bucket keeps and the key that encrypts them, USD a month."""
    kept = Job.model_fields["checkpoints_kept"].default
    return float(
        checkpoint_gib * kept * catalog.unit_price("s3-standard-storage", region).usd
        + catalog.unit_price("kms-key", region).usd
    )


def endpoints_usd_per_hour(catalog: Catalog, region: str) -> float:
    """The interface endpoints of a fleet in one zone, USD an hour."""
    return len(INTERFACE_ENDPOINTS) * catalog.unit_price("vpc-endpoint", region).usd
