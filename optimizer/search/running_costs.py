"""Prices of everything that a fleet pays besides its nodes: volumes, storage, endpoints, controller."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from optimizer.catalog import Catalog
from optimizer.economics.controller import controller_usd_per_hour
from optimizer.economics.fleet_cost import (
    GP3_INCLUDED_IOPS,
    GP3_INCLUDED_MIB_PER_S,
)
from optimizer.plan import INTERFACE_ENDPOINTS, Job, Volumes


def volume_usd_per_month(catalog: Catalog, region: str, volumes: Volumes | None = None) -> float:
    """The volumes of one node, USD a month."""
    v = volumes or Volumes()
    return (
        v.root_gib * catalog.unit_price("gp3-storage", region).usd
        + (v.iops - GP3_INCLUDED_IOPS) * catalog.unit_price("gp3-iops", region).usd
        + (v.throughput_mib_per_s - GP3_INCLUDED_MIB_PER_S) * catalog.unit_price("gp3-throughput", region).usd
    )


def storage_usd_per_month(catalog: Catalog, region: str, size_gib: float) -> float:
    """The checkpoints a bucket keeps and the key that encrypts them, USD a month."""
    kept = Job.model_fields["checkpoints_kept"].default
    return float(
        size_gib * kept * catalog.unit_price("s3-standard-storage", region).usd
        + catalog.unit_price("kms-key", region).usd
    )


def endpoints_usd_per_hour(catalog: Catalog, region: str) -> float:
    """The interface endpoints of a fleet in one zone, USD an hour."""
    return len(INTERFACE_ENDPOINTS) * catalog.unit_price("vpc-endpoint", region).usd


def besides_nodes(catalog: Catalog, size_gib: float) -> Callable[[str], tuple[float, float, float, float]]:
    """What a fleet pays in a region besides its nodes, USD.

    The volumes of a node and storage a month, endpoints and controller an hour. Each region is looked up once.
    """

    @cache
    def prices(region: str) -> tuple[float, float, float, float]:
        return (
            volume_usd_per_month(catalog, region),
            storage_usd_per_month(catalog, region, size_gib),
            endpoints_usd_per_hour(catalog, region),
            controller_usd_per_hour(catalog, region),
        )

    return prices
