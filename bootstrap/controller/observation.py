"""One tick's observation: ``gather`` reads it, ``decide`` applies the rules to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from bootstrap.contract.ending import IN_SERVICE, Member
from bootstrap.contract.report import NodeReport
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings, Lifecycle


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Reservations that a group launches its nodes into: these alone, or these first and then on demand."""

    reservation_ids: tuple[str, ...] = ()  # sorted
    only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoScalingGroup:
    """The stack's Auto Scaling group."""

    created_at: datetime
    desired: int
    min_size: int
    max_size: int
    on_demand_base: int | None  # None with one purchase option only
    members: tuple[Member, ...]
    subnets: frozenset[str] = frozenset()
    instance_types: tuple[str, ...] = ()  # of a mixed instances policy, in its order
    target: Target = Target()
    suspended: tuple[str, ...] = ()  # processes that Auto Scaling itself has suspended
    launches_off: bool = False  # somebody else has suspended launches
    ends_off: bool = False  # the ends of nodes are suspended
    warm_pool: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)

    def in_state(self, state: str) -> list[str]:
        """Ids of members in a lifecycle state."""
        return [member.instance_id for member in self.members if member.state == state]

    @property
    def in_service(self) -> list[str]:
        """Ids of members in service."""
        return self.in_state(IN_SERVICE)

    @property
    def leaving(self) -> list[str]:
        """Ids of members being terminated."""
        return [member.instance_id for member in self.members if member.state.startswith("Terminat")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An instance of EC2, stopped where it neither runs nor has ended."""

    instance_id: str
    instance_type: str
    lifecycle: Lifecycle
    launched_at: datetime
    running: bool  # hours are billed
    ended: bool  # never comes back
    until: datetime | None  # end of billing, where EC2 says it
    reclaimed: bool = False  # EC2 took it back
    launch_fault: str = ""  # why EC2 ended it at its launch
    usd_per_hour: float | None = None  # the spot market's price, or that of an owned node; None for the plan's
    subnet: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLaunch:
    """A launch that gave no instance, with AWS's message."""

    at: datetime
    message: str
    no_capacity: bool  # the pool or the quota has no room for the instance
    began_at: datetime | None = None
    subnet: str = ""  # of a launch that the pool refused; empty for a quota or an unknown subnet
    instance_type: str = ""  # of a reservation; a launch may have tried all types of the group


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A capacity reservation that the controller made, active or about to be."""

    reservation_id: str
    token: str  # of its request
    instance_type: str
    created_at: datetime
    active: bool  # billed
    total: int
    unused: int  # instances that it has room for


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything that a tick observes."""

    group: AutoScalingGroup | None
    machines: tuple[Machine, ...] = ()  # ended ones for about an hour
    missed: tuple[Machine, ...] = ()  # ended during an outage; known from activities
    interrupted: frozenset[str] = frozenset()  # ids in notices since the last tick, of the whole account
    rebalanced: frozenset[str] = frozenset()
    reports: dict[str, NodeReport] = field(default_factory=dict)  # by instance id, not yet in the state
    failed_launches: tuple[FailedLaunch, ...] = ()  # since the last tick
    request: PersonRequest | None = None
    scores: Mapping[str, int] | None = None  # spot placement scores by zone id; None: not asked
    reservations: tuple[Reservation, ...] = ()
    owned_free: int | None = None  # instances that the owned reservation has room for; None: unknown, or none is owned
    reservation_refused: FailedLaunch | None = None  # among failed_launches too, where capacity lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Input of the rules, besides the state."""

    settings: ControllerSettings
    seen: Observation
    now: datetime

    def count_rented(self, nodes: int) -> int:
        """Count the nodes, of so many new ones, that the owned reservation has no room for."""
        return max(0, nodes - (self.seen.owned_free or 0))
