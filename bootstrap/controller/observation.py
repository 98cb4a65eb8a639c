"""What one tick saw of the world; ``aws`` gathers it, ``decide`` judges it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from bootstrap.contract.report import NodeReport
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import Lifecycle


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An instance as the Auto Scaling group sees it.

    Attributes:
        state: lifecycle state, like "InService" or "Terminating:Wait".
        protected: whether scale-in spares it.
    """

    instance_id: str
    state: str
    protected: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoScalingGroup:
    """The Auto Scaling group.

    Attributes:
        on_demand_base: OnDemandBaseCapacity; None where the group buys one kind only.
    """

    created_at: datetime
    desired: int
    min_size: int
    max_size: int
    on_demand_base: int | None
    members: tuple[Member, ...]

    def in_state(self, *states: str) -> list[str]:
        """Ids of the members in one of ``states``."""
        return [member.instance_id for member in self.members if member.state in states]

    @property
    def leaving(self) -> list[str]:
        """Ids of the members that are being terminated."""
        return [member.instance_id for member in self.members if member.state.startswith("Terminat")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An instance as EC2 sees it.

    Attributes:
        running: whether its hours are billed: pending or running.
        ended: whether it is shutting down or terminated, and never comes back. Neither: it is stopped.
        until: when it stopped being billed, as EC2 says; None while running, or where EC2 does not say.
        reclaimed: whether EC2 took the spot capacity back.
        usd_per_hour: the spot market's present price where it runs, without its volume; None for the plan's price.
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
    """A launch that gave no instance."""

    at: datetime
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything.

    Attributes:
        group: None where there is none (yet, or any more).
        machines: instances of the group, ended ones for about an hour.
        missed: instances that ended while no tick looked for long, as Auto Scaling remembers them; EC2 does not.
        interrupted, rebalanced: instance ids of the notices since the last tick, of any instance of the account.
        reports: by instance id, those not yet in the state.
        failed_launches: since the last tick.
        request: what a person wants; None for nothing.
    """

    group: AutoScalingGroup | None
    machines: tuple[Machine, ...] = ()
    missed: tuple[Machine, ...] = ()
    interrupted: frozenset[str] = frozenset()
    rebalanced: frozenset[str] = frozenset()
    reports: dict[str, NodeReport] = field(default_factory=dict)
    failed_launches: tuple[FailedLaunch, ...] = ()
    request: PersonRequest | None = None
