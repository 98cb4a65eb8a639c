"""One tick's observation: ``gather`` reads it, ``decide`` applies the rules to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from bootstrap.contract.ending import IN_SERVICE, Member
from bootstrap.contract.report import NodeReport
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings, Lifecycle


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoScalingGroup:
    """The stack's Auto Scaling group."""

    created_at: datetime
    desired: int
    min_size: int
    max_size: int
    on_demand_base: int | None  # None where the group has one purchase option only
    members: tuple[Member, ...]

    def in_state(self, state: str) -> list[str]:
        """Ids of the members in a lifecycle state."""
        return [member.instance_id for member in self.members if member.state == state]

    @property
    def in_service(self) -> list[str]:
        """Ids of the members in service."""
        return self.in_state(IN_SERVICE)

    @property
    def leaving(self) -> list[str]:
        """Ids of the members that are being terminated."""
        return [member.instance_id for member in self.members if member.state.startswith("Terminat")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An instance as EC2 sees it; one that neither runs nor has ended is stopped."""

    instance_id: str
    instance_type: str
    lifecycle: Lifecycle
    launched_at: datetime
    running: bool  # hours are billed
    ended: bool  # never comes back
    until: datetime | None  # end of billing; None while running, or where EC2 does not say
    reclaimed: bool = False  # EC2 took the spot capacity back
    usd_per_hour: float | None = None  # the spot market's price in its zone; None for the plan's price


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLaunch:
    """A launch that gave no instance, with AWS's message."""

    at: datetime
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything that one tick observes."""

    group: AutoScalingGroup | None
    machines: tuple[Machine, ...] = ()  # instances of the group, ended ones for about an hour
    missed: tuple[Machine, ...] = ()  # ended during an outage: only Auto Scaling's activities still know them
    interrupted: frozenset[str] = frozenset()  # instance ids in notices since the last tick, of the whole account
    rebalanced: frozenset[str] = frozenset()
    reports: dict[str, NodeReport] = field(default_factory=dict)  # by instance id, those not yet in the state
    failed_launches: tuple[FailedLaunch, ...] = ()  # since the last tick
    request: PersonRequest | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """All that a rule may look at, besides the state."""

    settings: ControllerSettings
    seen: Observation
    now: datetime
