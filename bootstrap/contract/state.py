"""The controller's memory between two ticks: ``control/state.json`` in the stack's bucket.

The controller alone writes it. Money is in USD, times are UTC.

    phase         nodes  means
    waiting       0      for the next start, at next_attempt_at
    starting      0..N   all N nodes are asked for together, and boot; given back after the gang window
    running       N      the gang is, or was, complete (incomplete_since); workers: as many as the policies want
    draining      N..0   nodes save and end, but for those beside that the gang moves to; "after" follows
    paused        0      a person set the group's size to 0; `gpufleet resume` goes on
    stopped       0      a person asked for it; `gpufleet resume` goes on
    done          0      every node's command ended well
    failed        0      a node gave up, or no attempt brought the gang together
    unfit         0      too many nodes failed their set-up or tests
    over-budget   0      a ceiling is reached; a higher gpufleet:ceilingUsd, or gpufleet:sharedCeiling, goes on
    block-ended   0      the hours of all places are over; a plan with another Capacity Block, or none, goes on
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, get_args

from bootstrap.contract.capacity import PoolEvents
from bootstrap.contract.codec import FormatError, UnknownError, as_key, from_json, parse_json
from bootstrap.contract.pools import PoolRecord
from bootstrap.contract.report import ReportState
from bootstrap.contract.request import PersonRequest, StackSpend
from bootstrap.contract.settings import Lifecycle
from bootstrap.contract.timings import SILENT

FILE = "state.json"
SCHEMA_VERSION = 3
_NEWER = "a newer controller wrote it; `pulumi up` with that version, or the nodes end themselves in half an hour"

Ended = Literal["stopped", "done", "failed", "unfit", "over-budget", "block-ended"]
Phase = Literal["waiting", "starting", "running", "draining", "paused", Ended]
# Phases that want nodes, that want none for now.
UP: tuple[Phase, ...] = ("starting", "running")
PAUSES: tuple[Phase, ...] = ("waiting", "paused")
ENDED: tuple[Phase, ...] = get_args(Ended)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeteredInstance:
    """One instance's meter."""

    instance_type: str
    zone_id: str = ""  # empty: not among the settings'
    launched_at: datetime  # or last started
    ended_at: datetime | None = None  # end of billing
    metered_until: datetime  # time of spent_usd
    lifecycle: Lifecycle
    usd_per_hour: float = 0.0  # node and volume
    spent_usd: float = 0.0
    served: bool = False  # was ever in service
    interrupted: bool = False  # EC2 took it back
    maintenance_at: datetime | None = None  # EC2 ends or restarts it then
    given_back: bool = False  # without a fault of its own: the others of its launch were refused, or came too late
    leaving_since: datetime | None = None  # first tick in its terminate hook
    report: ReportState | None = None  # last of the present run
    reported_at: datetime | None = None  # when S3 took the last report


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCounts:
    """Nodes wanted, and members of the Auto Scaling group by state."""

    wanted: int = 0
    in_service: int = 0
    pending: int = 0
    terminating: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPlace:
    """One of the settings' places, and why it was chosen."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """Request for nodes that is written before AWS is asked; a tick that repeats it gets the same nodes."""

    place: str
    nodes: int
    first: int = 0  # nodes that the place's first group may take
    asked_at: datetime  # part of the request's ClientToken


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceAnswer:
    """AWS's answer to the last request for nodes of a place."""

    asked_at: datetime
    answer: str
    usd_per_hour: float  # of a node, as the plan has it


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """control/state.json."""

    schema_version: int = SCHEMA_VERSION
    run_id: str = field(metadata=as_key("run"))
    job: str
    phase: Phase
    after: Phase | None = None  # follows draining
    reason: str  # a sentence
    since: datetime  # of the phase
    run_started_at: datetime  # or begun anew
    updated_at: datetime  # the last tick
    spent_usd: float = 0.0  # by this job, with the stack's own cost and what other stacks spent on the job
    usd_per_hour: float = 0.0
    ceiling_usd: float | None = None
    shared_usd: float | None = None  # ceiling over several stacks
    others_usd: float = 0.0  # by the other stacks under it, with what their nodes may cost until they end
    meter: str = ""  # name of the stack's row there; a deleted state begins another
    fixed_usd: float = 0.0  # the stack itself since its first tick, with its unused reservation
    ended_usd: float = 0.0  # by instances that ended long ago
    earlier_usd: float = 0.0  # by earlier jobs; not in spent_usd
    nodes: NodeCounts = field(default_factory=NodeCounts)
    attempts: int = 0  # since a gang last held
    next_attempt_at: datetime | None = None
    incomplete_since: datetime | None = None  # the gang lacks nodes; of a start, when they were asked for
    complete_since: datetime | None = None  # all nodes are in service
    refused_since: datetime | None = None  # AWS refused nodes that the gang lacks, and none has come since
    on_demand: bool = False  # in place of spot nodes that did not come
    place: ChosenPlace | None = None  # where the nodes were last asked for
    group: str = ""  # Auto Scaling group of ``place``; another plan may give it another
    next_place: ChosenPlace | None = None  # where the attempt goes on
    beside: ChosenPlace | None = None  # whose nodes come while the gang works, which moves there once all serve
    beside_since: datetime | None = None
    round_started_at: datetime | None = None  # places that refused since are not tried again in this attempt
    pools: dict[str, PoolRecord] = field(default_factory=dict)  # by place; times are Unix times
    progress: float = 0.0  # share of the run that is done
    done_steps: int | None = None  # of the newest report; None: progress is the time that complete gangs have served
    unfit_nodes: int = 0  # in a row that failed their set-up or tests
    failed_launches: int = 0  # these two: in the run
    interruptions: int = 0
    last_failure: str = ""  # AWS's message
    desired_seen: int = 0  # the group's size at the last tick that wanted nodes
    request: PersonRequest | None = None  # the last obeyed
    instances: dict[str, MeteredInstance] = field(default_factory=dict)
    capacity: dict[str, PoolEvents] = field(default_factory=dict)  # by PoolName, of all runs
    launch: LaunchRequest | None = None  # unanswered
    answers: dict[str, PlaceAnswer] = field(default_factory=dict)  # by place
    elsewhere: dict[str, StackSpend] = field(default_factory=dict)  # by stack that the run moved away from

    def with_phase(self, phase: Phase, reason: str, now: datetime, **changes: Any) -> ControllerState:
        """Return this state in another phase, from ``now`` on."""
        changed = {"after": None, "next_attempt_at": None, "next_place": None, "beside": None, **changes}
        return replace(self, phase=phase, reason=reason, since=now, **changed)

    @property
    def total_usd(self) -> float:
        """Dollars that this stack spent, on all jobs."""
        return self.ended_usd + self.fixed_usd + sum(instance.spent_usd for instance in self.instances.values())

    @property
    def counted_elsewhere(self) -> list[StackSpend]:
        """Spend of other stacks on the present job."""
        return [spend for spend in self.elsewhere.values() if spend.job == self.job]

    def settle(self, now: datetime) -> StackSpend:
        """Return what this stack spent on its job, for the stack that the run moves to, once all nodes have ended.

        Nodes that the last tick saw alive count until ``now``.
        """
        rate = self.usd_per_hour - sum(spend.usd_per_hour for spend in self.counted_elsewhere)
        alive = sum(instance.usd_per_hour for instance in self.instances.values() if instance.ended_at is None)
        usd = self.total_usd - self.earlier_usd
        since_tick = StackSpend(job=self.job, usd=usd, usd_per_hour=rate, at=self.updated_at)
        return replace(since_tick, usd=since_tick.usd_until(now), usd_per_hour=max(0.0, rate - alive), at=now)

    def silent_s(self, now: datetime) -> float:
        """Seconds since the controller's last tick."""
        return (now - self.updated_at).total_seconds()

    def is_silent(self, now: datetime) -> bool:
        """Return whether nobody meters or ends the nodes any more."""
        return now - self.updated_at > SILENT


class NewerStateError(FormatError):
    """A state that a newer version of the controller wrote."""


def read_state(text: str, place: str, *, lenient: bool = False) -> ControllerState:
    """Parse an object, or raise NewerStateError or FormatError."""
    data = parse_json(text, place)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerStateError(f"{place} has schema_version {version}, this version {SCHEMA_VERSION}: {_NEWER}")
    if isinstance(version, int) and version < SCHEMA_VERSION:
        # Nothing reads the further fields of an earlier version.
        data, lenient = {**data, "schema_version": SCHEMA_VERSION}, True
    try:
        return from_json(ControllerState, data, place, lenient=lenient)
    except UnknownError as error:
        raise NewerStateError(f"{error}: {_NEWER}") from error
