"""GPUs, instance types and offers: facts that the catalog holds and the estimator reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Interconnect = Literal["none", "pcie", "nvlink", "nvswitch"]
CpuArchitecture = Literal["x86_64", "arm64"]

# Source of a derived spot price: on-demand price x (1 - the Spot Advisor's saving).
DERIVED_SPOT = "advisor-derived"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU model at one memory size, as its vendor's datasheet gives it.

    Attributes:
        key: unique name, model and memory ("a100-80gb"), as in tables of measured runs.
        name: the model as people ask for it ("A100").
        architecture: NVIDIA's name ("Ampere").
        memory_gib: memory as EC2 reports it, GiB (SizeInMiB / 1024).
        memory_bandwidth_gb_per_s: HBM or GDDR bandwidth, GB/s (10^9 bytes).
        peak_tflop_per_s: dense peak by precision, TFLOP/s (10^12); only precisions that its matrix or vector units run.
        nvlink_gb_per_s: NVLink bandwidth of one GPU, both directions together, GB/s; 0 without NVLink.
        pcie_gb_per_s: one direction of the GPU's slot, GB/s: 15.75 in generation 3, 31.5 in 4, 63 in 5.
        visible_memory_share: share of ``memory_gib`` that nvidia-smi shows; below 1 where error correction takes some.
        die: name of the GPU model with the same processor, under which efficiencies are measured.
        network_gbit_per_s: network of one GPU in NVIDIA's reference system, Gbit/s; 25 for PCIe cards.
        source, as_of: the datasheet's address, and when it was read.
    """

    key: str
    name: str
    architecture: str
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    peak_tflop_per_s: Mapping[str, float]
    nvlink_gb_per_s: float
    pcie_gb_per_s: float
    visible_memory_share: float
    die: str
    network_gbit_per_s: float
    source: str
    as_of: date


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One EC2 instance type with NVIDIA GPUs, as DescribeInstanceTypes gives it.

    Attributes:
        name: "p5.48xlarge".
        gpu: the GPU model.
        gpu_count: GPUs of one instance; below 1 for a fractional GPU (g6f).
        gpu_memory_gib: memory of one GPU (or of the fraction) as this type gets it, GiB.
        vcpus, memory_gib: host processors and memory, GiB.
        nvme_gb: local NVMe in total, GB; 0 for none.
        network_gbit_per_s: baseline network bandwidth of one instance, all cards together, Gbit/s.
        network_cards: network cards.
        efa_cards: EFA interfaces the type can have (MaximumEfaInterfaces); 0 without EFA.
        interconnect: link between the instance's GPUs.
        cpu_architecture: "x86_64" or "arm64".
        source, as_of: source of the row, and when it was read.
    """

    name: str
    gpu: Gpu
    gpu_count: float
    gpu_memory_gib: float
    vcpus: int
    memory_gib: float
    nvme_gb: float
    network_gbit_per_s: float
    network_cards: int
    efa_cards: int
    interconnect: Interconnect
    cpu_architecture: CpuArchitecture
    source: str
    as_of: date

    @property
    def ranks(self) -> int:
        """Ranks of one instance: one a GPU, and one for a fraction of a GPU."""
        return max(1, math.floor(self.gpu_count))


@dataclass(frozen=True, kw_only=True, slots=True)
class HourlyPrice:
    """A price in USD per instance-hour.

    Attributes:
        source, as_of: source, and when it was read.
        zone_id: the zone of the price ("use1-az6"); empty for the whole region.
    """

    usd_per_hour: float
    source: str
    as_of: date
    zone_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One instance type in one region with its prices; an unpublished price is None, never a guess.

    Attributes:
        instance: the type.
        region: "us-east-1".
        zone_ids: zone ids that offer the type ("use1-az6"), sorted; empty where unknown.
        on_demand, reserved_1yr, spot: prices per instance-hour; reserved is one year, no upfront.
        interruption_band: Spot Advisor's share of instances interrupted in a month, as (low, high); high is None for
            the open band ">20%"; the whole field is None where the advisor has no row.
    """

    instance: InstanceType
    region: str
    zone_ids: tuple[str, ...] = ()
    on_demand: HourlyPrice | None = None
    reserved_1yr: HourlyPrice | None = None
    spot: HourlyPrice | None = None
    interruption_band: tuple[float, float | None] | None = None
