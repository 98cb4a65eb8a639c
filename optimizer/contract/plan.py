"""``FleetPlan``: the contract between the optimizer, which decides, and infra and bootstrap, which carry out.

A plan ends with a digest of its fields: a plan edited by hand is refused before it costs money. Saved plans must stay
readable: fields may be added with a default, none renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bootstrap.contract import trainer
from bootstrap.contract.fine_tuning import FULL_TRAINING, FineTuning
from bootstrap.contract.node_plan import Expected, NodePlan
from bootstrap.contract.settings import SpotPolicy
from bootstrap.contract.timings import BLOCK_TAIL, BOOT, LEAVING_S, seconds_to_end, seconds_to_save
from bootstrap.contract.words import counted
from optimizer.contract.errors import describe_invalid, unreadable
from optimizer.contract.spelling import INSTANCE_TYPE, REGION, ZONE_ID
from optimizer.contract.units import short

SCHEMA_VERSION: Literal[1] = 1

# Owner of Ubuntu's own images: https://documentation.ubuntu.com/aws/aws-how-to/instances/find-ubuntu-images/
CANONICAL = "099720109477"
# VPC interface endpoints of a fleet, in one zone, each billed per hour: infra creates them, the optimizer prices them.
# ec2 (find the peers), autoscaling (lifecycle hooks, protection), logs, monitoring (the nodes' metrics), ssm and
# ssmmessages (Session Manager instead of SSH, parameters), sts (the training's own role). Not kms and sqs: S3, SSM and
# EBS call KMS themselves, the queue of node events is read outside the VPC. Not ec2messages: the agent does not need
# it since 3.3.40 (https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-create-vpc.html).
INTERFACE_ENDPOINTS = ("autoscaling", "ec2", "logs", "monitoring", "ssm", "ssmmessages", "sts")

# Throughput of the file system for training data: PERSISTENT_2's least, for which the catalog has a dated price. 250,
# 500 and 1000 cost more; a larger file system is faster as well:
# https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html
LUSTRE_MB_PER_S_PER_TIB = 125

PurchaseOption = Literal["on-demand", "spot", "reserved", "capacity-block"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]
ActivationCheckpointing = Literal["none", "selective", "full"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


# 95th percentile of the standard normal distribution.
_NORMAL_P95 = 1.6449


class PlanError(ValueError):
    """A plan that cannot be read or carried out, or contradicts itself; the message says where and why."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def left_out(description: str | None = None, *, default: Any = None, **limits: Any) -> Any:
    """Field that the JSON leaves out at its default: earlier plans lack it, and a run's id is a digest of the job."""
    return Field(default=default, exclude_if=lambda value: value == default, description=description, **limits)


class Interface(NamedTuple):
    """A network interface of a node."""

    card: int
    device: int
    kind: Literal["interface", "efa-only"]


def describe_unbootable(name: str, owner: str) -> str:
    """Say why no node sets itself up on an image of AWS's or Canonical's, by alias or id; empty for any other."""
    if owner not in ("amazon", CANONICAL) or re.match(r"Deep Learning .*Ubuntu.2[24]\.04", name, re.IGNORECASE):
        return ""
    return (
        "is no Deep Learning AMI for Ubuntu 22.04 or 24.04, which the set-up is written for; a stock image has no AWS "
        "CLI, and Ubuntu's archives are plain HTTP, which the nodes' security group forbids"
    )


def describe_undriven(gpu: str, gpu_count: float) -> str:
    """Say why AWS's Deep Learning AMIs do not drive a type's GPUs; empty where they do."""
    if gpu == "V100":
        # Volta has no GSP, which NVIDIA's open kernel modules need: https://github.com/NVIDIA/open-gpu-kernel-modules
        return "has V100 GPUs; the Deep Learning AMIs have NVIDIA's open driver, which starts with Turing"
    if gpu_count < 1:
        return (
            f"has {gpu_count:g} of a GPU; a fractional GPU needs NVIDIA's vGPU (GRID) driver, which the Deep Learning "
            "AMIs do not have (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/install-nvidia-driver.html)"
        )
    return ""


class NodeSpec(_Model):
    """The facts of one instance that infra and bootstrap need."""

    gpu: str = Field(description="GPU model, as offers prints it (H100).")
    gpu_count: Positive = Field(description="GPUs of one instance; below 1 for a fractional GPU.")
    gpu_memory_gib: Positive = Field(description="Memory of one GPU, GiB.")
    vcpus: Count
    memory_gib: Positive = Field(description="Host memory, GiB.")
    nvme_gb: NonNegative = Field(description="Local NVMe in total, GB; 0 for none.")
    network_gbit_per_s: Positive = Field(description="Network bandwidth of one instance, Gbit/s.")
    network_cards: Count
    efa_cards: int = Field(ge=0, description="EFA interfaces to attach; 0 where the type has none.")
    gpudirect: bool = Field(description="EFA reads and writes GPU memory; false without EFA.")
    interconnect: Literal["none", "pcie", "nvlink", "nvswitch"]
    cpu_architecture: Literal["x86_64", "arm64"]

    @property
    def ranks(self) -> int:
        """Ranks of one node: one a GPU, and one for a fraction of a GPU."""
        return max(1, math.floor(self.gpu_count))

    @property
    def needs_efa(self) -> bool:
        """True where NCCL has to use EFA."""
        return self.efa_cards > 0 and self.gpudirect

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """Interfaces to attach: the node's address on card 0, and an EFA-only interface on each card that has EFA.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
        """
        # Card 0 of p6-b300.48xlarge has no EFA: 17 cards, 16 EFA (https://github.com/aws/aws-parallelcluster/issues/7143).
        efa = range(self.network_cards - self.efa_cards, self.network_cards) if self.efa_cards else range(0)
        # Device 0 of card 0 is the primary interface, which cannot be EFA-only.
        return Interface(0, 0, "interface"), *(Interface(card, int(card == 0), "efa-only") for card in efa)


class CapacityBlock(_Model):
    """Times of a bought Capacity Block; AWS ends its instances from BLOCK_TAIL before the end on."""

    start: AwareDatetime = Field(description="Start with its time zone, like 2026-12-01T11:30:00Z.")
    end: AwareDatetime = Field(description="End, likewise.")
    zone_id: Annotated[str, Field(pattern=ZONE_ID)] | None = left_out("Its zone; null for gpufleet:zoneId.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end {self.end.isoformat()} is not after start {self.start.isoformat()}")
        return self


# A stack has eight places (bootstrap/contract/settings.py), and one may be on demand.
MOST_BLOCKS = 7


class NextBlock(CapacityBlock):
    """A Capacity Block that the nodes go on in."""

    capacity_reservation_id: str = Field(pattern=r"^cr-[0-9a-f]{8,17}$")


def usable_hours(blocks: Sequence[CapacityBlock], now: datetime, reserve_s: float = 0.0) -> float:
    """Hours from ``now`` or the first start until a save of ``reserve_s`` ends the last block; gaps between count."""
    left = max(block.end for block in blocks) - BLOCK_TAIL - max(blocks[0].start, now)
    return max(0.0, left / timedelta(hours=1) - reserve_s / 3600)


def block_gaps(blocks: Sequence[CapacityBlock], now: datetime) -> list[tuple[float, float]]:
    """Hours after which each block but the last closes, and hours from then until nodes of the next one train."""
    pairs = [(block.end - BLOCK_TAIL, max(block.end, later.start) + BOOT) for block, later in pairwise(blocks)]
    hour = timedelta(hours=1)
    return [((closes - max(blocks[0].start, now)) / hour, (opens - closes) / hour) for closes, opens in pairs]


class SpotRange(_Model):
    """Spot prices of a plan that are older than their limit, over the zones of its region.

    ``cost_usd`` of the plan is at its own zone's price, and its 95th percentile has the spread of the prices' age.
    """

    model_config = ConfigDict(extra="ignore")  # An earlier stack's plan has more, and stop reads it.

    age_days: int = Field(ge=0, description="Age of the prices when the plan was made.")
    limit_days: int = Field(ge=0, description="Age up to which such prices are current.")
    zones: int = Field(ge=0, description="Zones with a price; 0 where one is derived for the whole region.")
    cost_usd_dearest: NonNegative = Field(
        description="Expected USD of the run in the dearest zone; cost_usd is of the plan's own."
    )


class Purchase(_Model):
    """A purchase of the nodes."""

    model_config = ConfigDict(extra="ignore")  # An earlier stack's plan has spot_types, and stop reads it.

    option: PurchaseOption
    on_demand_base: int = Field(default=0, ge=0, description="Nodes bought on demand before any spot node.")
    on_demand_top_up: int = left_out(
        "Nodes bought on demand beside the existing reservation, which all the others are in.", default=0, ge=0
    )
    fallback: Literal["none", "on-demand"] = Field(
        default="none", description="Replaces missing spot capacity, and Capacity Blocks that are over."
    )
    capacity_reservation_id: str | None = Field(
        default=None,
        pattern=r"^cr-[0-9a-f]{8,17}$",
        description="Existing reservation or Capacity Block; null with option reserved makes infra create one.",
    )
    capacity_block: CapacityBlock | None = Field(default=None, description="Null for the other options.")
    next_blocks: tuple[NextBlock, ...] = left_out(
        "Blocks that follow capacity_block, in their order.", default=(), max_length=MOST_BLOCKS - 1
    )
    zone_id: Annotated[str, Field(pattern=ZONE_ID)] | None = Field(
        default=None, description="Zone that the spot price is of: the nodes go there. Null without one."
    )

    @property
    def on_demand_nodes(self) -> int:
        """Nodes that are bought on demand beside spot or reserved ones."""
        return self.on_demand_base + self.on_demand_top_up

    @property
    def needs_on_demand_price(self) -> bool:
        """Nodes of another option may be bought on demand as well."""
        return self.on_demand_nodes > 0 or self.fallback == "on-demand"

    @property
    def blocks(self) -> tuple[CapacityBlock, ...]:
        """All Capacity Blocks, in their order."""
        return (*([self.capacity_block] if self.capacity_block else []), *self.next_blocks)

    @property
    def in_short(self) -> str:
        """The option with its nodes on demand: "spot (+1 on-demand)"."""
        return self.option + (f" (+{self.on_demand_nodes} on-demand)" if self.on_demand_nodes else "")


# Splits, in the order they are written.
SHORT_NAMES = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}


class Parallelism(_Model):
    """The configuration; data × tensor × pipeline × context is the number of GPUs.

    The training code must implement each split (tensor, pipeline, context, expert) above 1.
    """

    data: Count
    sharding: Sharding
    tensor: Count = 1
    pipeline: Count = 1
    context: Count = 1
    expert: Count = Field(default=1, description="Data-parallel ranks that together hold each expert; divides data.")
    sequence_parallel: bool = Field(default=False, description="Tensor ranks split norms, dropout and residual too.")
    virtual_stages: Count = Field(default=1, description="Model chunks of one pipeline rank (interleaved schedule).")
    micro_batch: Count = Field(description="Sequences (or images) of one forward pass on one data-parallel rank.")
    grad_accum: Count
    activation_checkpointing: ActivationCheckpointing

    @property
    def beyond_data(self) -> tuple[str, ...]:
        """The splits."""
        return tuple(name for name in SHORT_NAMES if getattr(self, name) > 1)

    @property
    def in_short(self) -> str:
        """Ranks of each mesh dimension: "TP2 PP4x2 DP8"; x2 are the virtual stages."""
        ranks = {kind: f"{SHORT_NAMES[kind]}{getattr(self, kind)}" for kind in self.beyond_data}
        if "pipeline" in ranks and self.virtual_stages > 1:
            ranks["pipeline"] += f"x{self.virtual_stages}"
        return " ".join([*ranks.values(), f"DP{self.data}"])


class Memory(_Model):
    """Peak GPU memory of the fullest rank."""

    peak_gib: Positive
    p95_gib: Positive = Field(
        description="95th percentile of the peak, with what CUDA streams keep from each other; binds the limit."
    )
    limit_gib: Positive = Field(description="What a process can have on this GPU, GiB.")
    breakdown: dict[str, NonNegative] = Field(description="GiB by part; the parts add up to peak_gib.")


class Spread(_Model):
    """An expected value with its median and 95th percentile."""

    expected: NonNegative
    p50: NonNegative
    p95: NonNegative


class CostBreakdown(_Model):
    """Expected USD by part."""

    compute: NonNegative
    volumes: NonNegative
    storage: NonNegative
    transfer: NonNegative = Field(description="VPC interface endpoints, and copies of the data out of another region.")
    head_node: NonNegative

    def total(self) -> float:
        """Sum of the parts, USD."""
        return self.compute + self.volumes + self.storage + self.transfer + self.head_node


class Cost(Spread):
    """Cost of the whole run in USD; the breakdown adds up to ``expected``."""

    breakdown: CostBreakdown


class Staging(_Model):
    """Copies of the training data from S3 to the nodes' disks; their hours and dollars are part of the plan's."""

    data_gib: Positive = Field(description="Size of the data.")
    files: Count | None = Field(default=None, description="Files of the data; null for large ones.")
    node_hours: Positive = Field(description="Hours of one node's copy: at the start, and of each new node.")
    gib_per_s: Positive = Field(description="Rate of one node's copy.")
    bound: Literal["network", "nvme", "volume", "s3", "requests"] = Field(description="What bounds the rate.")
    source: str = Field(description="Where the bound comes from.")
    hours: NonNegative = Field(description="Expected hours of the run in which the nodes wait for copies.")
    compute_usd: NonNegative = Field(description="USD of the nodes in these hours, part of compute.")
    storage_usd: NonNegative = Field(description="USD of the data in S3 over the run and of its requests.")
    data_region: Annotated[str, Field(pattern=REGION)] | None = left_out("Region of the data's bucket, if another.")
    transfer_usd: NonNegative = left_out("USD of the copies' bytes out of data_region, part of transfer.", default=0.0)

    def describe(self, nodes: int) -> str:
        """Say how long ``nodes`` nodes copy, at what rate and cost, and what bounds the rate."""
        each = f"each of {nodes} nodes copies" if nodes > 1 else "the node copies"
        minutes = self.node_hours * 60
        took = f"{short(minutes)} min" if minutes >= 1 else f"{short(minutes * 60)} s"
        return (
            f"{each} {short(self.data_gib)} GiB in {took}, at the start and when replaced "
            f"({short(self.gib_per_s)} GiB/s, bound by {self.bound}): {short(self.hours)} h and "
            f"{self.compute_usd:,.2f} USD of compute in all, {self.storage_usd:,.2f} USD of S3 storage and requests"
            + (f", {self.transfer_usd:,.2f} USD of transfer from {self.data_region}" if self.data_region else "")
        )


class PlannedLustre(_Model):
    """FSx for Lustre file system that the nodes read the training data from, in place of copies to their disks."""

    storage_gib: Count = Field(description="Its storage: 1200, or a multiple of 2400.")
    data_gib: Positive = Field(description="Size of the data in S3.")
    usd: NonNegative = Field(description="USD of it over the run, part of storage.")

    def describe(self) -> str:
        """Say what the file system is, reads and costs; AWS provides its throughput without burst."""
        mb_per_s = LUSTRE_MB_PER_S_PER_TIB * self.storage_gib / 1024
        return (
            f"FSx for Lustre of {self.storage_gib:,} GiB, {short(mb_per_s)} MB/s for all nodes, holds what they "
            f"read of {short(self.data_gib)} GiB in S3: {self.usd:,.2f} USD over the run"
        )


class Interruption(_Model):
    """Interruptions that the run is expected to meet."""

    rate: NonNegative = Field(
        description="Interruptions of the fleet an hour, over its nodes: hardware failures, and reclaims of spot."
    )
    source: str = Field(description="Where the rate comes from.")
    wait_hours: NonNegative | None = Field(
        None, description="Mean hours that one spot node waits for capacity after a reclaim; null without spot."
    )
    expected_count: NonNegative = Field(description="Interruptions of the whole fleet over the run.")
    checkpoint_interval_s: Positive
    checkpoint_stall_s: NonNegative = Field(description="What one checkpoint stops the training for.")
    checkpoint_save_s: NonNegative = Field(
        description="From a checkpoint's step until it is stored and counts, beside the training."
    )
    checkpoint_usd: NonNegative = Field(description="S3's price of one checkpoint that is pruned later.")
    lost_hours: NonNegative = Field(description="Expected hours lost to recomputation, restarts and copies of data.")

    @property
    def most_lost_s(self) -> float:
        """Most work that one interruption undoes, s: an interval, and what was not stored yet."""
        return self.checkpoint_interval_s + self.checkpoint_save_s


# Markets that nodes are bought in, with their words in a price's ``item``. Saved plans have these words: do not reword.
Market = Literal["on-demand", "spot", "owned-reservation", "reserved-1yr", "capacity-block"]
MARKET_LABELS: dict[Market, str] = {
    "on-demand": "on-demand",
    "spot": "spot",
    "owned-reservation": "owned reservation",
    "reserved-1yr": "reserved, one year, no upfront, paid to its end",
    "capacity-block": "capacity block",
}
# Beginning of the source of a price that the user negotiated; no catalog has it.
QUOTE = "quote: "
_MARKETS = {label: market for market, label in MARKET_LABELS.items()}


class NodeItem(NamedTuple):
    """The priced node of a plan's price: market, instance type and region."""

    market: Market
    instance_type: str
    region: str

    def __str__(self) -> str:
        """The ``item`` of the plan's JSON: "spot p5.48xlarge us-east-1"."""
        return f"{MARKET_LABELS[self.market]} {self.instance_type} {self.region}"


class PlanPrice(_Model):
    """One price the plan's cost uses."""

    item: str = Field(description='What is priced, like "spot p5.48xlarge us-east-1".')
    usd: NonNegative
    per: str = Field(description='Unit the price is for, like "hour" or "GB-month".')
    source: str
    as_of: date

    @cached_property
    def node(self) -> NodeItem | None:
        """The node that is priced by the hour; None for any other price, like "gp3-storage us-east-1"."""
        words = self.item.rsplit(" ", 2)
        market = _MARKETS.get(words[0])
        return NodeItem(market, *words[1:]) if market and len(words) == 3 and self.per == "hour" else None


class SpeedSource(_Model):
    """Source and error of the speed estimate."""

    source: str
    relative_error: NonNegative = Field(description="Standard deviation of log(predicted/measured) time on its rows.")
    rows: int = Field(ge=0, description="Measured rows behind it; 0 where the GPU has none.")


class Volumes(_Model):
    """EBS volume of each node, gp3.

    Limits: https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
    """

    root_gib: Annotated[int, Field(ge=75, le=65536)] = 200
    iops: Annotated[int, Field(ge=3000, le=80000)] = 3000
    throughput_mib_per_s: Annotated[int, Field(ge=125, le=2000)] = 250


class PlannedJob(_Model):
    """The training run the fleet is for."""

    model: str
    parameters: Count
    samples: Count = Field(description="Sequences (or images) to train on.")
    tokens: Count = Field(description="Tokens to train on; equals samples for a CNN.")
    seq_len: Count = Field(description="Tokens of one sequence; 1 where samples count.")
    target_len: Count | None = left_out(
        "Tokens that the decoder of T5 or Whisper writes; left out where the request gives none."
    )
    global_batch: Count = Field(description="Sequences (or images) of one optimizer step.")
    steps: Count
    precision: Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16", "fp8"]
    optimizer: str
    compiled: bool = left_out("torch.compile.", default=False)
    tuning: FineTuning = left_out("Part of the model that trains; left out where all does.", default=FULL_TRAINING)
    framework: str = left_out("Profile of the training code that speed and memory are estimated for.", default="torch")
    architecture: dict[str, Any] | None = left_out(
        "Hugging Face config of the model, or {torchvision: NAME}; null where the trainer cannot build it."
    )
    model_revision: str | None = left_out(
        "Repository and commit of the Hugging Face Hub that the architecture was read from."
    )
    checkpoint_gib: NonNegative = Field(description="Size of one checkpoint (parameters and optimizer state).")
    checkpoints_kept: Count = 3
    budget_usd: Positive | None = None
    deadline_hours: Positive | None = None


class Alternate(_Model):
    """A place for all nodes of a plan when the plan's own place has no capacity; the layout and node count stay.

    Every node is bought the same way: no on-demand base. On spot the plan's fallback counts.
    """

    zone_id: Annotated[str, Field(pattern=ZONE_ID)]
    instance_type: str = Field(pattern=INSTANCE_TYPE)
    purchase: Literal["on-demand", "spot"]
    price: PlanPrice = Field(description="Price of one node, by the hour.")
    step_time_s: Positive
    tokens_per_second: Positive
    hours: Spread = Field(description="Hours of the whole run, started in this place.")
    cost_usd: Cost = Field(description="Cost of the whole run, started in this place.")
    interruption: Interruption
    # Left out of the JSON for the plan's own type.
    node: NodeSpec | None = left_out()
    memory: Memory | None = left_out()
    calibration: SpeedSource | None = left_out()
    staging: Staging | None = left_out()


class PolicyOutlook(_Model):
    """Hours and dollars of the whole run under the spot policy that ``gpufleet stack set`` proposes."""

    model_config = ConfigDict(extra="ignore")  # An earlier stack's plan has more, and stop reads it.

    policy: SpotPolicy
    hours: Spread
    cost_usd: Spread = Field(description="The 95th percentile is at least that of a run without any spot node.")
    expected_usd: dict[SpotPolicy, NonNegative] = Field(
        description="Expected USD by policy; without adaptive where the deadline leaves no time for a launch."
    )
    source: str = Field(description="Where the numbers come from.")

    def describe(self) -> str:
        """Describe in a line what this policy costs, and what the other policy would."""
        other = "; ".join(f"{name}: {usd:,.2f} USD" for name, usd in self.expected_usd.items() if name != self.policy)
        return (
            f"{self.policy}: {self.cost_usd.expected:,.2f} USD and {short(self.hours.expected)} h expected, at p95 "
            f"{self.cost_usd.p95:,.2f} USD and {short(self.hours.p95)} h ({self.source})"
            f"; {other or 'adaptive has no time for a launch'}"
        )


class FleetPlan(_Model):
    """One way to meet a request: nodes, purchase, configuration, hours and dollars."""

    schema_version: Literal[1] = SCHEMA_VERSION
    instance_type: str = Field(pattern=INSTANCE_TYPE)
    region: str = Field(pattern=REGION)
    zone_ids: tuple[Annotated[str, Field(pattern=ZONE_ID)], ...] = Field(
        description="Zones that offer the type; empty where unknown."
    )
    node_count: Annotated[int, Field(ge=1, le=1000)]
    node: NodeSpec
    volumes: Volumes = Volumes()
    purchase: Purchase
    job: PlannedJob
    parallelism: Parallelism
    memory: Memory
    step_time_s: Positive
    step_breakdown_s: dict[str, NonNegative] | None = left_out(
        "Seconds of a step by part; the parts add up to step_time_s."
    )
    tokens_per_second: Positive = Field(description="Of the whole fleet; samples per second for a CNN.")
    mfu: Annotated[float, Field(gt=0, le=1)]
    hours: Spread
    cost_usd: Cost
    interruption: Interruption
    prices: tuple[PlanPrice, ...]
    spot_range: SpotRange | None = Field(default=None, description="Null where the prices were current.")
    calibration: SpeedSource
    expected: Expected | None = left_out(
        "Rates that the smoke tests compare with, each with the limits below which they warn and fail."
    )
    staging: Staging | None = left_out(
        "Copies of the training data; null where the request has no data_gib, or lustre_gib."
    )
    lustre: PlannedLustre | None = left_out(
        "File system of the training data; null where the request has no lustre_gib."
    )
    alternates: tuple[Alternate, ...] = left_out(
        "Places to go to when the plan's own has no capacity, in the order of trying.", default=()
    )
    spot_policy: PolicyOutlook | None = left_out(
        "Proposed spot policy of a plan with a fallback and a deadline, with its hours and dollars."
    )

    digest: str = left_out("Digest of the other fields, spot_policy aside: a changed plan is refused.", default="")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        p, batch = self.parallelism, self.job.global_batch
        if p.data * p.tensor * p.pipeline * p.context != self.gpus:
            raise ValueError(
                f"parallelism covers {p.data} x {p.tensor} x {p.pipeline} x {p.context} GPUs (data, tensor, pipeline, "
                f"context), and {counted(self.node_count, 'node')} of {self.node.gpu_count:g} GPUs have {self.gpus}"
            )
        if p.data * p.micro_batch * p.grad_accum != batch:
            raise ValueError(
                f"data {p.data} x micro_batch {p.micro_batch} x grad_accum {p.grad_accum} is not global_batch {batch}"
            )
        return self

    def is_old(self, alternate: Alternate) -> bool:
        """Return whether an alternate's spot price was older than the limit when the plan was made."""
        old = self.spot_range
        if old is None or alternate.purchase != "spot":
            return False
        return old.age_days - (alternate.price.as_of - self.prices[0].as_of).days > old.limit_days

    @property
    def wanted_zone_ids(self) -> tuple[str, ...]:
        """Zones to put nodes in: the zone of the spot price or block, else all that offer the type."""
        block = self.purchase.capacity_block
        zone_id = self.purchase.zone_id or (block and block.zone_id)
        return (zone_id,) if zone_id else self.zone_ids

    @property
    def fleet(self) -> str:
        """The nodes and how they are bought: "8 x p4d.24xlarge (reserved, 4 on-demand)"."""
        others = f", {self.purchase.on_demand_nodes} on-demand" if self.purchase.on_demand_nodes else ""
        return f"{self.node_count} x {self.instance_type} ({self.purchase.option}{others})"

    @property
    def owned_nodes(self) -> int:
        """Nodes that run in the plan's reservation or Capacity Block, where it has one."""
        return self.node_count - self.purchase.on_demand_top_up

    @property
    def gpus(self) -> int:
        """Ranks of the whole fleet."""
        return self.node_count * self.node.ranks

    @property
    def node_plan(self) -> NodePlan:
        """Job and layout as training code has them; ``plan_variables`` adds predictions and limits."""
        split, job = self.parallelism, self.job
        return NodePlan(
            architecture=job.architecture or {},
            steps=job.steps,
            seq_len=job.seq_len,
            target_len=job.target_len or 0,
            global_batch=job.global_batch,
            micro_batch=split.micro_batch,
            precision=job.precision,
            compiled=job.compiled,
            sharding=split.sharding,
            tensor_parallel=split.tensor,
            sequence_parallel=split.sequence_parallel,
            context_parallel=split.context,
            pipeline_parallel=split.pipeline,
            virtual_stages=split.virtual_stages,
            expert_parallel=split.expert,
            activation_checkpointing=split.activation_checkpointing,
            **asdict(job.tuning),
            optimizer=job.optimizer,
        )

    @cached_property
    def beyond_trainer(self) -> tuple[str, ...]:
        """Parts that the reference trainer does not carry out, each with its reason; empty where it trains the plan."""
        return tuple(trainer.unsupported(self.node_plan, gpus_per_node=self.node.ranks, framework=self.job.framework))

    @property
    def step_time_p95_s(self) -> float:
        """95th percentile of the step time, s: log-normal with the estimate's relative error."""
        return self.step_time_s * math.exp(_NORMAL_P95 * self.calibration.relative_error)

    @cached_property
    def node_prices_usd_per_hour(self) -> dict[NodeItem, float]:
        """Price of each node that the plan may buy, USD per hour, in the order of ``prices``."""
        prices: dict[NodeItem, float] = {}
        for price in self.prices:
            node = price.node
            if node and (node.region, node.instance_type) == (self.region, self.instance_type):
                prices.setdefault(node, price.usd)
        return prices

    @property
    def hours_with_nodes(self) -> Spread:
        """Hours of the run without the gaps between its Capacity Blocks."""
        gaps = block_gaps(self.purchase.blocks, datetime.min.replace(tzinfo=UTC))
        return self.hours.model_copy(
            update={name: hours - sum(gap for closes, gap in gaps if closes < hours) for name, hours in self.hours}
        )

    @property
    def compute_usd_per_hour(self) -> float:
        """Expected price of the whole fleet's nodes, USD per hour of the run; of a commitment, its hourly price."""
        own = [*self.node_prices_usd_per_hour.values()]
        if self.purchase.option == "reserved" and not self.purchase.on_demand_top_up and own:
            return own[0] * self.node_count
        return self.cost_usd.breakdown.compute / self.hours_with_nodes.expected

    @property
    def checkpoint_writers(self) -> int:
        """Nodes that write a checkpoint together while training; of ddp, one for each pipeline stage."""
        return (
            min(self.node_count, self.parallelism.pipeline) if self.parallelism.sharding == "ddp" else self.node_count
        )

    @property
    def _saving(self) -> tuple[float, float, int]:
        # One node writes a state that every rank holds whole; all nodes write a sharded one together.
        writers = 1 if self.parallelism.sharding == "ddp" else self.node_count
        return self.step_time_s, self.job.checkpoint_gib, writers

    @property
    def save_limit_s(self) -> int:
        """Time limit of a node's last checkpoint, s."""
        return seconds_to_save(*self._saving)

    @property
    def terminate_timeout_s(self) -> int:
        """Timeout of the terminate hook, s; a spot reclaim ends the node two minutes after its notice all the same."""
        return self.save_limit_s + LEAVING_S

    @property
    def reserve_s(self) -> int:
        """Drain reserve, s."""
        return seconds_to_end(*self._saving)

    @property
    def reserve_usd(self) -> float:
        """Drain reserve, USD, besides ``cost_usd``: nodes at their dearest price, but those of a paid commitment."""
        purchase = self.purchase
        committed = purchase.option == "reserved" and purchase.capacity_reservation_id is None
        dearest = max(self.node_prices_usd_per_hour.values(), default=0.0)
        above_base = dearest
        if purchase.fallback == "none":
            spot = [usd for node, usd in self.node_prices_usd_per_hour.items() if node.market == "spot"]
            above_base = max(spot, default=dearest)
        nodes = purchase.on_demand_base * dearest + (self.node_count - purchase.on_demand_base) * above_base
        if purchase.on_demand_top_up:
            nodes = self.compute_usd_per_hour
        running = (self.cost_usd.expected - self.cost_usd.breakdown.compute) / self.hours.expected
        return ((0.0 if committed else nodes) + running) * self.reserve_s / 3600

    def reserve_usd_at(self, place: Alternate) -> float:
        """Drain reserve in a place of ``alternates``, USD; the plan's fallback counts for its spot nodes."""
        falls_back = place.purchase == "spot" and self.purchase.fallback == "on-demand"
        on_demand = NodeItem("on-demand", place.instance_type, self.region)
        usd = max([place.price.usd, *(price.usd for price in self.prices if falls_back and price.node == on_demand)])
        running = (place.cost_usd.expected - place.cost_usd.breakdown.compute) / place.hours.expected
        _, checkpoint_gib, writers = self._saving
        return (self.node_count * usd + running) * seconds_to_end(place.step_time_s, checkpoint_gib, writers) / 3600

    def seal(self) -> FleetPlan:
        """Return the plan with its digest."""
        text = json.dumps(self.model_dump(mode="json", exclude={"digest", "spot_policy"}))
        # A YAML or JSON tool may write 5.0 as 5.
        plain = json.dumps(json.loads(text, parse_int=float), sort_keys=True)
        return self.model_copy(update={"digest": hashlib.sha256(plain.encode()).hexdigest()[:16]})

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.model_dump(mode="json"))


def read_plan(text: str, *, plan_number: int = 1, origin: str = "the plan") -> FleetPlan:
    """Read one FleetPlan, or the ``plan_number``-th (from 1) of a ``recommend`` output, or raise PlanError."""
    try:
        data: Any = json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:  # also a number of thousands of digits
        raise PlanError(f"{origin} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{origin} holds a JSON {type(data).__name__}, and a plan is an object")
    if "plans" in data:
        plans = data["plans"]
        if not isinstance(plans, list) or not plans:
            raise PlanError(
                f"{origin} is recommend output without plans: nothing met its limits; recommend has the nearest"
            )
        if not 1 <= plan_number <= len(plans):
            raise PlanError(f"{origin} holds {counted(len(plans), 'plan')}, there is no plan {plan_number}")
        data = plans[plan_number - 1]
    elif plan_number != 1:
        raise PlanError(f"{origin} holds one plan, there is no plan {plan_number}")
    return plan_from_dict(data, origin=origin)


def plan_from_dict(data: Any, *, origin: str = "the plan", is_deployed: bool = False) -> FleetPlan:
    """Check ``data`` as a FleetPlan; PlanError names each wrong field with its place, value and limit.

    A deployed plan keeps the digest that an earlier version gave it, so that its nodes can be ended.
    """
    try:
        plan = FleetPlan.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{origin} is not a valid FleetPlan:\n  " + "\n  ".join(describe_invalid(error))) from error
    if not is_deployed and plan.digest not in ("", plan.seal().digest):
        raise PlanError(
            f"{origin}: a field was changed since recommend wrote the plan, or another version wrote it: change the "
            "request, and recommend again"
        )
    return plan


def read_plan_text(path: Path) -> str:
    """Read a plan's file as text, or raise PlanError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(unreadable(path, error)) from error
