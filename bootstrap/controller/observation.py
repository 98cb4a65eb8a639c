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
    """The stack's Auto Scaling group.

    Attributes:
        on_demand_base: OnDemandBaseCapacity; None where the group has one purchase option only.
    """

    created_at: datetime
    desired: int
    min_size: int
    max_size: int
    on_demand_base: int | None
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
    """An instance as EC2 sees it; one that neither runs nor has ended is stopped.

    Attributes:
        running: whether its hours are billed: pending or running.
        ended: whether it is shutting down or terminated, and never comes back.
        until: end of billing; None while running, or where EC2 does not say.
        reclaimed: whether EC2 took the spot capacity back.
        usd_per_hour: the spot market's present price in its zone, without its volume; None for the plan's price.
    """

    instance_id: str
    instance_type: str
    lifecycle: Lifecycle
    launched_at: datetime
    running: bool
    ended: bool
    until: datetime | None
    reclaimed: bool = False
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedLaunch:
    """A launch that gave no instance, with AWS's message."""

    at: datetime
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything that one tick observes.

    Attributes:
        group: None where there is none (yet, or any more).
        machines: instances of the group, ended ones for about an hour.
        missed: instances that ended during an outage: EC2 has forgotten them, Auto Scaling's activities have not.
        interrupted, rebalanced: instance ids in the notices since the last tick, of any instance of the account.
        reports: by instance id, those not yet in the state.
        failed_launches: since the last tick.
        request: None without one.
    """

    group: AutoScalingGroup | None
    machines: tuple[Machine, ...] = ()
    missed: tuple[Machine, ...] = ()
    interrupted: frozenset[str] = frozenset()
    rebalanced: frozenset[str] = frozenset()
    reports: dict[str, NodeReport] = field(default_factory=dict)
    failed_launches: tuple[FailedLaunch, ...] = ()
    request: PersonRequest | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """All that a rule may look at, besides the state."""

    settings: ControllerSettings
    seen: Observation
    now: datetime
