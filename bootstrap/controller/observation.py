"""One tick's observation: ``gather`` reads it, ``decide`` applies the rules to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from bootstrap.contract.ending import IN_SERVICE, STANDBY, Member
from bootstrap.contract.report import NodeReport
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings, Lifecycle, OpeningHours, Place
from bootstrap.contract.shared_ceiling import StackRow
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import BLOCK_TAIL


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoScalingGroup:
    """Auto Scaling group of a place, or the first of its two."""

    created_at: datetime
    desired: int
    min_size: int
    max_size: int
    members: tuple[Member, ...]
    suspended: tuple[str, ...] = ()  # processes: by Auto Scaling itself, but the ends of nodes by anyone
    zones: tuple[str, ...] = ()  # names, as this account has them

    @property
    def in_service(self) -> list[str]:
        """Ids of members in service."""
        return [member.instance_id for member in self.members if member.state == IN_SERVICE]

    @property
    def leaving(self) -> list[str]:
        """Ids of members being terminated."""
        return [member.instance_id for member in self.members if member.state.startswith("Terminat")]

    def staying(self, ended: Collection[str]) -> list[str]:
        """Ids of members of the group's size that are neither being terminated nor among the ``ended`` instances."""
        return sorted({it.instance_id for it in self.members if it.state != STANDBY}.difference(self.leaving, ended))


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An instance of EC2; a stopped one has not ended."""

    instance_id: str
    instance_type: str
    lifecycle: Lifecycle
    launched_at: datetime
    ended: bool
    until: datetime | None  # end of billing, where AWS says it
    forgotten: bool = False  # EC2 describes it no more
    reclaimed: bool = False  # EC2 took it back
    launch_fault: str = ""  # why EC2 ended it at its launch
    usd_per_hour: float | None = None  # the spot market's price, or that of an owned node; None for the plan's
    subnet: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchAnswer:
    """AWS's answer to the state's request for nodes (``launches.py`` classifies the codes)."""

    ids: tuple[str, ...]  # of the launched instances
    message: str = ""  # why fewer came than were asked for; empty: all came
    code: str = ""
    subnet: str = ""  # in which they lack


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Everything that a tick observes."""

    groups: Mapping[str, AutoScalingGroup]  # by key (``ControllerSettings.groups``); those that exist
    machines: tuple[Machine, ...] = ()  # ended ones for about an hour
    interrupted: frozenset[str] = frozenset()  # ids in notices since the last tick, of the whole account
    maintenance: Mapping[str, datetime] = field(default_factory=dict)  # times by id, likewise
    receipts: Sequence[str] = ()  # of these notices' messages
    reports: dict[str, NodeReport] = field(default_factory=dict)  # by instance id, not yet in the state
    request: PersonRequest | None = None
    rows: Mapping[str, StackRow] = field(default_factory=dict)  # under the shared ceiling, by meter
    rows_etag: str | None = None  # of their object

    @property
    def created_at(self) -> datetime | None:
        """Time at which the first group was made."""
        return min((group.created_at for group in self.groups.values()), default=None)

    @property
    def ended(self) -> frozenset[str]:
        """Ids of instances that have ended, some of which a group may still have."""
        return frozenset(machine.instance_id for machine in self.machines if machine.ended)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Input of the rules, besides the state."""

    settings: ControllerSettings
    seen: Observation
    now: datetime

    @property
    def hours_ahead(self) -> dict[str, OpeningHours]:
        """Opening hours that are not over, by place: all is saved before EC2 ends a block's nodes."""
        reserve = BLOCK_TAIL + self.settings.ending
        return {name: times for name, times in self.settings.opening_hours.items() if self.now < times.end - reserve}

    def open_places(self, state: ControllerState) -> dict[str, Place]:
        """Return the places that nodes may be in now; one without hours opens once the hours of all others are over.

        A run in such a place stays there until the next block begins, which was bought meanwhile.
        """
        ahead, always = self.hours_ahead, self.settings.places.keys() - self.settings.opening_hours.keys()
        stays = state.place and state.place.name in always and all(self.now < times.start for times in ahead.values())
        return {
            name: place
            for name, place in self.settings.places.items()
            if (ahead[name].start <= self.now if name in ahead else name in always and (stays or not ahead))
        }

    def groups(self, place: str) -> list[AutoScalingGroup]:
        """Return the groups of a place, in the order in which they are filled; none unless all exist."""
        keys = self.settings.keys_of(place)
        return [self.seen.groups[key] for key in keys] if self.seen.groups.keys() >= set(keys) else []

    def others_usd(self, state: ControllerState) -> float:
        """Return what the other stacks under the shared ceiling owe at most."""
        return sum(row.usd_until(self.now) for meter, row in self.seen.rows.items() if meter != state.meter)

    def place_name(self, state: ControllerState) -> str:
        """Return the gang's place; the plan's own before the first start, and where the plan no longer has it."""
        return state.place.name if state.place and state.place.name in self.settings.places else self.settings.own_place

    def staying(self, place: str) -> int:
        """Count the place's nodes that live, and are not being terminated."""
        return sum(len(group.staying(self.seen.ended)) for group in self.groups(place))

    def in_service(self, place: str) -> int:
        """Count the place's nodes in service."""
        return len({key for group in self.groups(place) for key in group.in_service} - self.seen.ended)
