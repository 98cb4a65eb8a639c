"""GPUs, instance types and offers: facts that the catalog holds and the estimator reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from bootstrap.contract.capacity import PoolEvents, PoolName
from optimizer.contract.units import HOURS_PER_YEAR

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Interconnect = Literal["none", "pcie", "nvlink", "nvswitch"]
CpuArchitecture = Literal["x86_64", "arm64"]

# Source of a derived spot price: on-demand price x (1 - the Spot Advisor's saving).
DERIVED_SPOT = "advisor-derived"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU model at one memory size, from its vendor's datasheet.

    Attributes:
        key: unique name, model and memory ("a100-80gb"), as in tables of measured runs; ``name`` is the model ("A100").
        memory_gib: memory as EC2 reports it, GiB (SizeInMiB / 1024).
        peak_tflop_per_s: dense peak by precision, TFLOP/s (10^12); only precisions that its matrix or vector units run.
        nvlink_gb_per_s: NVLink bandwidth of one GPU, both directions together, GB/s; 0 without NVLink.
        pcie_gb_per_s: one direction of the GPU's slot, GB/s: 15.75 in generation 3, 31.5 in 4, 63 in 5.
        visible_memory_share: share of ``memory_gib`` that nvidia-smi shows; below 1 where error correction takes some.
        die: name of the GPU model with the same processor, under which efficiencies are measured.
        network_gbit_per_s: network of one GPU in NVIDIA's reference system, Gbit/s; 25 for PCIe cards.
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

    @property
    def visible_memory_gib(self) -> float:
        """Memory that the driver shows: EC2's less error correction."""
        return self.memory_gib * self.visible_memory_share


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """One EC2 instance type with NVIDIA GPUs, from DescribeInstanceTypes.

    Attributes:
        gpu_count: below 1 for a fractional GPU (g6f).
        gpu_memory_gib: memory of one GPU (or of the fraction) as this type gets it.
        memory_gib: host memory.
        nvme_gb: local NVMe in total; 0 for none.
        network_gbit_per_s: baseline bandwidth, all cards together.
        card_interfaces: most interfaces of each network card, card 0 first.
        efa_cards: EFA interfaces the type can have (MaximumEfaInterfaces); 0 without EFA.
        gpudirect: EFA reads and writes GPU memory; without, collectives between nodes pass through host memory.
        interconnect: link between the instance's GPUs.
    """

    name: str
    gpu: Gpu
    gpu_count: float
    gpu_memory_gib: float
    vcpus: int
    memory_gib: float
    nvme_gb: float
    network_gbit_per_s: float
    card_interfaces: tuple[int, ...]
    efa_cards: int
    gpudirect: bool
    interconnect: Interconnect
    cpu_architecture: CpuArchitecture
    source: str
    as_of: date

    @property
    def network_cards(self) -> int:
        """Network cards of one instance."""
        return len(self.card_interfaces)

    @property
    def ranks(self) -> int:
        """Ranks of one instance: one a GPU, and one for a fraction of a GPU."""
        return max(1, math.floor(self.gpu_count))


def is_named(name: str, pattern: str) -> bool:
    """True for a type or region itself, a type of the family (p5), and a match of the pattern (g6*, US-*)."""
    name, pattern = name.lower(), pattern.lower()
    return fnmatchcase(name, pattern) or name.split(".")[0] == pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class HourlyPrice:
    """A price in USD per instance-hour; ``zone_id`` ("use1-az6") is empty for the whole region."""

    usd_per_hour: float
    source: str
    as_of: date
    zone_id: str = ""

    def is_above(self, other: HourlyPrice) -> bool:
        """Return whether the price is above ``other``; EC2 rounds spot prices to four decimals."""
        return self.usd_per_hour > other.usd_per_hour + 0.5e-4 + 1e-9


class Zones(NamedTuple):
    """Ids of the zones that offer a type ("use1-az6"), sorted."""

    ids: tuple[str, ...]
    source: str
    as_of: date


class InterruptionBand(NamedTuple):
    """Share of instances interrupted in a month, between ``low`` and ``high``; None for the open band ">20%"."""

    low: float
    high: float | None
    source: str
    as_of: date


def break_even_hours(commitment: HourlyPrice | None, other: HourlyPrice | None) -> float | None:
    """Return the hours of use in a year from which a commitment costs less than ``other``.

    None where a price is missing, or the commitment costs more though used all the time.
    """
    if commitment is None or other is None or commitment.usd_per_hour >= other.usd_per_hour:
        return None
    return commitment.usd_per_hour / other.usd_per_hour * HOURS_PER_YEAR


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedPool:
    """Capacity events of a pool that one of the user's stacks saw, or EC2 Capacity Manager, read at ``learned_at``."""

    name: PoolName
    stack: str  # empty: Capacity Manager, which counts all the account's instances
    learned_at: datetime
    events: PoolEvents

    @property
    def origin(self) -> str:
        """Who saw the events."""
        return f"stack {self.stack}" if self.stack else "EC2 Capacity Manager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One instance type in one region with its prices; an unpublished price is None, never a guess.

    Attributes:
        zones: those that offer the type; None where unknown.
        reserved_1yr: a Reserved Instance of one year, nothing upfront.
        capacity_block: published rate of an hour of a Capacity Block; each block is offered at its own.
        spot: of the cheapest zone; of the whole region where it is derived.
        dearer_spot: of the other zones, the cheapest first.
        interruptions: Spot Advisor's band; None without a row.
        learned_spot: events that the user's stacks saw in its spot pools.
    """

    instance: InstanceType
    region: str
    zones: Zones | None = None
    on_demand: HourlyPrice | None = None
    reserved_1yr: HourlyPrice | None = None
    capacity_block: HourlyPrice | None = None
    spot: HourlyPrice | None = None
    dearer_spot: tuple[HourlyPrice, ...] = ()
    interruptions: InterruptionBand | None = None
    learned_spot: tuple[LearnedPool, ...] = ()

    @property
    def zone_ids(self) -> tuple[str, ...]:
        """Ids of the zones that offer the type; empty where unknown."""
        return self.zones.ids if self.zones else ()

    def with_spot(self, prices: Iterable[HourlyPrice]) -> Offer:
        """Return the offer with these spot prices, at most one a zone, all of one source and day."""
        first, *others = sorted(prices, key=lambda price: (price.usd_per_hour, price.zone_id)) or (None,)
        return replace(self, spot=first, dearer_spot=tuple(others))

    @property
    def spot_by_zone(self) -> tuple[HourlyPrice, ...]:
        """Spot prices of all zones, the cheapest first."""
        return (self.spot, *self.dearer_spot) if self.spot else ()

    @property
    def prices(self) -> tuple[tuple[str, HourlyPrice], ...]:
        """Known prices with what each is for; spot's of every zone."""
        known = ("on-demand", self.on_demand), ("reserved", self.reserved_1yr), ("capacity-block", self.capacity_block)
        spot = (("spot", price) for price in self.spot_by_zone)
        return (*((kind, price) for kind, price in known if price is not None), *spot)
