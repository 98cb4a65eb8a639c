"""The controller's settings: one JSON environment variable, written by infra/controller.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import FormatError, as_key, from_json, parse_json

# A function's variables have 4 KB together:
# https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html
VARIABLE = "GPUFLEET_CONTROL"

# Minutes that the controller pays an incomplete gang, where gpufleet:gangWindowMinutes is not set.
DEFAULT_GANG_WINDOW_MINUTES = 45

Lifecycle = Literal["on-demand", "spot", "capacity-block"]
SpotPolicy = Literal["fallback", "adaptive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTimes:
    """Start and end of the bought Capacity Block."""

    start: datetime
    end: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place that a gang may run in: one instance type of one purchase option in one zone.

    A lone node may have several zones.
    """

    subnets: str  # ids with commas, as Auto Scaling takes them
    instance_types: str  # with commas: the plan's own place has its further spot types
    purchase: Literal["on-demand", "spot"]
    usd_per_hour: float  # of a node without its volume
    speed: float  # work per hour over that of the plan's own place
    hours_p95: float  # of the whole run
    usd_p95: float  # of the whole run

    @property
    def usd_per_work_hour(self) -> float:
        """Price of the work that a node of the plan's own place does in an hour."""
        return self.usd_per_hour / self.speed


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedStart:
    """A gang on demand starts in a capacity reservation of all its nodes, which is cancelled once they run."""

    instance_type: str  # of the plan's own place
    placement_group_arn: str  # empty without one


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedNodes:
    """Existing reservation that a part of the gang's nodes launch into first; the others are rented on demand."""

    reservation_id: str
    nodes: int  # of the plan; others of the account may have left room for fewer
    usd_per_hour: float  # of a node without its volume


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """Settings of a stack's controller."""

    schema_version: Literal[1]
    stack: str
    region: str
    group: str  # Auto Scaling group
    launch_hook: str
    terminate_hook: str
    bucket: str
    control_prefix: str  # folder in the bucket
    queue_url: str  # of node events
    metric_namespace: str
    mode: Literal["training", "workers"]  # one gang, or nodes that train alone, as many as scaling policies want
    run_id: str = field(metadata=as_key("run"))  # another id is a new run
    job: str  # another job starts the meter at zero
    node_count: int  # of workers, the most
    min_nodes: int  # of workers, the fewest; 0 for a gang
    prices: dict[str, dict[str, float]]  # USD per node-hour by lifecycle ("spot"; reserved are on-demand) and type
    volume_usd_per_node_hour: float  # from launch to termination
    fixed_usd_per_hour: float  # as long as the stack exists
    reserved_nodes: int  # of the stack's own reservation, billed also while unused
    ceiling_usd: float | None
    gang_window_s: int  # limit of an incomplete gang
    drain_s: int  # limit of a node's last checkpoint and terminate hook
    fallback_on_demand: bool  # replace spot nodes that do not come
    on_demand_base: int  # nodes on demand from the beginning
    scheduled: bool  # schedules start and pause the gang
    block: BlockTimes | None
    deadline_hours: float | None = None  # since the run's start
    # By name, the plan's own first: a refused gang goes to the next. Empty: the group stays where `pulumi up` put it.
    places: dict[str, Place] = field(default_factory=dict)
    zones: dict[str, str] = field(default_factory=dict)  # zone id by subnet id
    spot_policy: SpotPolicy = "fallback"
    steps: int = 0  # optimizer steps of the whole run; 0: unknown
    checkpoint_interval_s: float = 0.0  # with the time until a checkpoint is stored
    reserved_start: ReservedStart | None = None  # None: nodes on demand are asked for one by one
    owned: OwnedNodes | None = None
    waits: bool = False  # starts no node before a person's first request

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ControllerSettings:
        """Read the settings from ``GPUFLEET_CONTROL``, or raise a FormatError."""
        text = environment.get(VARIABLE, "")
        try:
            data = parse_json(text, VARIABLE)
        except FormatError as error:
            raise FormatError(f"{VARIABLE} is not JSON ({text[:80]!r}): run `pulumi up`, which writes it") from error
        return from_json(cls, data, VARIABLE)

    def usd_per_hour(self, lifecycle: Lifecycle, instance_type: str) -> float:
        """Price of a node with its volume, USD per hour; the dearest known price for an unknown type."""
        by_type = self.prices.get(lifecycle, {})
        return by_type.get(instance_type, self.dearest_usd_per_hour) + self.volume_usd_per_node_hour

    @property
    def adaptive(self) -> bool:
        """The gang moves between spot and on-demand places by ``bootstrap.contract.pool_policy``."""
        return self.spot_policy == "adaptive" and bool(self.places)

    @property
    def own_place(self) -> str:
        """Name of the plan's own place; empty without places."""
        return next(iter(self.places), "")

    @property
    def dearest_usd_per_hour(self) -> float:
        """Highest price of a node without its volume, USD per hour."""
        owned = [self.owned.usd_per_hour] if self.owned else []
        return max([price for by_type in self.prices.values() for price in by_type.values()] + owned)
