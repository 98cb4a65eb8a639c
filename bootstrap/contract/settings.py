"""The controller's settings: a JSON object in the stack's bucket, written by infra/controller.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from bootstrap.contract.codec import as_key, from_json, parse_json
from bootstrap.contract.shared_ceiling import SharedCeiling
from bootstrap.contract.timings import ENDING, TICK

# The function's variable with the object's URI. Variables have 4 KB together, less than eight places need:
# https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html
VARIABLE = "GPUFLEET_CONTROL"

# Tag of all that a stack has; its value is the stack.
STACK_TAG = "gpufleet:stack"
# Places of a stack, and so its groups, at most.
MAX_PLACES = 8
# Minutes that the controller pays an incomplete gang, where gpufleet:gangWindowMinutes is not set.
DEFAULT_GANG_WINDOW_MINUTES = 45

Lifecycle = Literal["on-demand", "spot", "capacity-block"]
SpotPolicy = Literal["fallback", "adaptive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpeningHours:
    """Times between which a place has nodes: those of a bought Capacity Block."""

    start: datetime
    end: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstGroup:
    """Group that a place launches from before its own group; zone and type are the same."""

    number: int
    nodes: int  # at most
    purchase: Literal["on-demand", "spot"]
    usd_per_hour: float
    reservation_id: str = ""  # existing reservation that its nodes are in


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place that a gang may run in: one zone; a lone node's may have several.

    Its nodes are of one market, in one Auto Scaling group; with a ``first`` group (an owned reservation, nodes on
    demand beside spot ones) the place is the union of both.
    """

    number: int  # of its group, from 1
    subnets: str  # ids with commas, as Auto Scaling takes them
    instance_type: str
    purchase: Literal["on-demand", "spot"]
    usd_per_hour: float  # of a node without its volume
    speed: float  # work per hour over that of the plan's own place
    hours_p95: float  # of the whole run
    usd_p95: float  # of the whole run
    first: FirstGroup | None = None

    @property
    def usd_per_work_hour(self) -> float:
        """Price of the work that a node of the plan's own place does in an hour."""
        return self.usd_per_hour / self.speed

    @property
    def dearest_usd_per_hour(self) -> float:
        """Highest price of a node that the place may get."""
        return max(self.usd_per_hour, self.first.usd_per_hour if self.first else 0.0)


def first_key(place: str) -> str:
    """Return the key of a place's first group; that of its own group is the place's name."""
    return f"{place}, first"


def group_name(first: str, number: int) -> str:
    """Return the name of a stack's Auto Scaling group; ``first`` is that of the plan's own place, number 1."""
    return first if number == 1 else f"{first}-{number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """Settings of a stack's controller."""

    schema_version: Literal[1]
    stack: str
    region: str
    group: str  # Auto Scaling group of the plan's own place
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
    places: dict[str, Place]  # by name, the plan's own first
    opening_hours: dict[str, OpeningHours] = field(default_factory=dict)  # of the places that are not always open
    is_reserved: bool = False  # the nodes' capacity is paid with or without them, and no other capacity is asked for
    deadline_hours: float | None = None  # since the run's start
    zones: dict[str, str] = field(default_factory=dict)  # zone id by subnet id
    spot_policy: SpotPolicy = "fallback"
    steps: int = 0  # optimizer steps of the whole run; 0: unknown
    checkpoint_interval_s: float = 0.0  # with the time until a checkpoint is stored
    waits: bool = False  # starts no node before a person's first request
    shared: SharedCeiling | None = None

    @classmethod
    def from_text(cls, text: str, where: str) -> ControllerSettings:
        """Read the settings from JSON text; FormatError: it is at fault, and ``where`` names the place."""
        return from_json(cls, parse_json(text, where), where)

    def usd_per_hour(self, lifecycle: Lifecycle, instance_type: str) -> float:
        """Price of a node with its volume, USD per hour; the dearest known price for an unknown type."""
        by_type = self.prices.get(lifecycle, {})
        return by_type.get(instance_type, self.dearest_usd_per_hour) + self.volume_usd_per_node_hour

    @property
    def ending(self) -> timedelta:
        """Time until all nodes have ended where the next tick ends them."""
        return timedelta(seconds=self.drain_s) + ENDING + TICK

    @property
    def adaptive(self) -> bool:
        """The gang moves between spot and on-demand places by ``bootstrap.contract.pool_policy``."""
        return self.spot_policy == "adaptive"

    def is_paid(self, place: str) -> bool:
        """Return whether a place's capacity is paid with or without nodes."""
        return self.is_reserved or place in self.opening_hours

    @property
    def owned(self) -> FirstGroup | None:
        """Part of the gang that is in an existing reservation; the others are rented on demand."""
        first = self.places[self.own_place].first
        return first if first and first.reservation_id else None

    @property
    def own_place(self) -> str:
        """Name of the plan's own place."""
        return next(iter(self.places))

    def keys_of(self, place: str) -> tuple[str, ...]:
        """Return the keys of a place's groups, in the order in which they are filled."""
        return (first_key(place), place) if place in self.places and self.places[place].first else (place,)

    def group_of(self, key: str) -> str:
        """Return the name of the Auto Scaling group with a key (``groups``)."""
        return next((name for name, known in self.groups.items() if known == key), key)

    @property
    def groups(self) -> dict[str, str]:
        """Keys by Auto Scaling group; the key of a group that an earlier plan has left is its name.

        Nodes in it are metered, and end.
        """
        names = [group_name(self.group, number) for number in range(1, MAX_PLACES + 1)]
        found = {name: name for name in names}
        for place, known in self.places.items():
            found[group_name(self.group, known.number)] = place
            if known.first:
                found[group_name(self.group, known.first.number)] = first_key(place)
        return found

    @property
    def dearest_usd_per_hour(self) -> float:
        """Highest price of a node without its volume, USD per hour."""
        owned = [self.owned.usd_per_hour] if self.owned else []
        return max([price for by_type in self.prices.values() for price in by_type.values()] + owned)
