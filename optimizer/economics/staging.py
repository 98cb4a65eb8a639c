"""Staging: time, requests and disk space of one node's copy of the training data (docs/economics.md derives them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from bootstrap.contract.staging import CONNECTIONS, PART_BYTES, RESERVE_BYTES, THREADS
from bootstrap.contract.words import counted
from optimizer.catalog.gpus import read_table
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import NodeSpec, Volumes
from optimizer.contract.units import GIB

NVME_WRITES = Path(__file__).parent / "data" / "nvme_writes.csv"

Bound = Literal["network", "nvme", "volume", "s3", "requests"]

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html: 85 to 90 MB/s a request.
S3_BYTES_PER_S_PER_CONNECTION = 85e6
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html (read 2026-11-23): small
# objects take roughly 100 to 200 ms.
S3_LATENCY_S = 0.2
# CPU time of one small file in the one process that copies (tests/benchmarks/results/staging_202611.md).
CLIENT_S_PER_FILE = 0.0052
S_PER_FILE = max(CLIENT_S_PER_FILE, S3_LATENCY_S / THREADS)
# Instance stores are rated by random writes of 4 KiB; longer writes are not slower.
NVME_BLOCK_BYTES = 4096
# Space that image and packages take of a root volume (the least of FleetPlan.volumes.root_gib), on types without NVMe.
IMAGE_GIB = 75
# Writes of an unlisted type's disks, a second and GB: the least of any listed one, g6e.12xlarge.
LEAST_IOPS_PER_GB = 125_000 / 3800


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCopy:
    """One node's copy of the data: its hours, its GET requests, and what bounds it."""

    data_gib: float
    files: int | None
    hours: float
    requests: int
    gib_per_s: float
    bound: Bound
    source: str


def disk_gib(machine: InstanceType, volumes: Volumes) -> float:
    """Space for data on a node, GiB: its NVMe disks, else what the image leaves of the root volume."""
    space = machine.nvme_gb * 1e9 / GIB if machine.nvme_gb else volumes.root_gib - IMAGE_GIB
    return max(0.0, space - RESERVE_BYTES / GIB)


def node_copy(name: str, machine: InstanceType, volumes: Volumes, *, data_gib: float, files: int | None) -> NodeCopy:
    """Plan the copy of ``data_gib`` in ``files`` (None: large ones) to one node of type ``name``."""
    disk, disk_source = _write_bytes_per_s(name, machine, volumes)
    # Only the card of the node's address carries S3's traffic; EFA-only cards have no IP.
    network = machine.network_gbit_per_s / machine.network_cards * 1e9 / 8
    rates: dict[Bound, tuple[float, str]] = {
        "network": (network, "baseline bandwidth of one network card (DescribeInstanceTypes)"),
        "nvme" if machine.nvme_gb else "volume": (disk, disk_source),
        "s3": (
            CONNECTIONS * S3_BYTES_PER_S_PER_CONNECTION,
            f"{CONNECTIONS} connections of 85 MB/s (optimizing-performance-guidelines of the S3 User Guide)",
        ),
    }
    bound = min(rates, key=lambda name: rates[name][0])
    rate, source = rates[bound]
    seconds = data_gib * GIB / rate
    requests = math.ceil(data_gib * GIB / PART_BYTES) + (files or 0)
    if files and (for_files := files * S_PER_FILE) > seconds:
        seconds, bound = for_files, "requests"
        source = f"{counted(files, 'file')}, {1 / S_PER_FILE:.0f} a second by one process (staging_202611.md)"
    return NodeCopy(
        data_gib=data_gib,
        files=files,
        hours=seconds / 3600,
        requests=requests,
        gib_per_s=data_gib / seconds,
        bound=bound,
        source=source,
    )


def least_pull_s(machine: NodeSpec, volumes: Volumes, *, compressed_gib: float) -> float:
    """Bound a container image's pull from below, s: docker writes the layers and, unpacked, at least as much again."""
    # One card has the traffic, as above, and the volume its provisioned throughput.
    network = machine.network_gbit_per_s / machine.network_cards * 1e9 / 8
    return compressed_gib * GIB * max(1 / network, 2 / (volumes.throughput_mib_per_s * 2**20))


def _write_bytes_per_s(name: str, machine: InstanceType, volumes: Volumes) -> tuple[float, str]:
    if not machine.nvme_gb:
        # https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
        return volumes.throughput_mib_per_s * 2**20, "provisioned throughput of the root volume (gp3)"
    rows = _nvme_writes()
    what = "random writes of 4 KiB, the least it does"
    if row := rows.get(name):
        return float(row["random_write_iops"]) * NVME_BLOCK_BYTES, f"{what}: {row['source']}, {row['as_of']}"
    least = LEAST_IOPS_PER_GB * machine.nvme_gb
    return least * NVME_BLOCK_BYTES, f"{what}, a GB, of any known type: {NVME_WRITES.name}"


@cache
def _nvme_writes() -> dict[str, dict[str, str]]:
    return {row["instance_type"]: row for row in read_table(NVME_WRITES, dict)}
