"""What the controller knows between two ticks: control/state.json in the stack's bucket.

Written by the controller alone, read by `gpufleet status`. Money in USD, times in UTC, to the second.

    phase         nodes  means
    waiting       0      the next start is due at next_attempt_at
    starting      0..N   all N nodes are asked for; given back when they are not together within the gang window
    running       N      the gang is complete, or was: incomplete_since tells since when a node is missing; workers: as
                         many as the scaling policies want
    draining      N..0   nodes save their last checkpoint and end; "after" is the phase that follows
    paused        0      a schedule, or a person, set the group's size to 0, and brings it back
    stopped       0      a person asked for it; `gpufleet resume` goes on
    done          0      every node said that the command ended well
    failed        0      a node gave up, or the gang did not come together in any of its attempts
    unfit         0      too many nodes failed their set-up or tests
    over-budget   0      the ceiling is reached; a higher gpufleet:ceilingUsd goes on
    block-ended   0      the Capacity Block ends; a plan with another one, or with none, goes on
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, get_args

from bootstrap.controller.codec import FormatError, UnknownError, from_json, to_json
from bootstrap.controller.settings import Lifecycle

SCHEMA_VERSION: Literal[1] = 1

Phase = Literal[
    "waiting",
    "starting",
    "running",
    "draining",
    "paused",
    "stopped",
    "done",
    "failed",
    "unfit",
    "over-budget",
    "block-ended",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Nothing but a person's request, a new run, a higher ceiling (over-budget) or another purchase (block-ended) leaves
# these.
ENDED: tuple[Phase, ...] = ("stopped", "done", "failed", "unfit", "over-budget", "block-ended")

# What a node says of itself (bootstrap/README.md, "control/nodes").
Report = Literal["training", "done", "gave-up", "unfit", "sick"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance's meter.

    Attributes:
        instance_type: like "p5.48xlarge".
        launched_at: its (last) start.
        ended_at: when EC2 stopped billing it; None while it lives.
        metered_until: up to when spent_usd is.
        lifecycle: how it is billed.
        usd_per_hour: node and volume, at present.
        spent_usd: since it was launched.
        served: whether it was ever in service.
        interrupted, rebalanced: whether EC2 took it back, or said that it may.
        leaving_since: when its terminate hook was first seen to hold it; None before.
        report: what it said last, in the present run; None for nothing yet.
        reported_at: when S3 took its last report.
    """

    instance_type: str
    launched_at: datetime
    ended_at: datetime | None = None
    metered_until: datetime
    lifecycle: Lifecycle
    usd_per_hour: float
    spent_usd: float
    served: bool = False
    interrupted: bool = False
    rebalanced: bool = False
    leaving_since: datetime | None = None
    report: Report | None = None
    reported_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """How many nodes there are, by what Auto Scaling says of them."""

    wanted: int = 0
    in_service: int = 0
    pending: int = 0
    terminating: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a person wants: control/request.json."""

    schema_version: Literal[1]
    want: Literal["run", "stop"]
    at: datetime
    by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """control/state.json.

    Attributes:
        run, job: of the settings, as of the last tick.
        phase, after: see above; ``after`` is None but for draining.
        reason: why, a sentence.
        since: when the phase began.
        run_started_at: when this run began, or was begun anew.
        updated_at: of the last tick.
        spent_usd: of this job, everything in it.
        usd_per_hour: what an hour costs at present.
        ceiling_usd: None for no limit.
        fixed_usd: what the stack itself cost since its first tick, with its unused reservation.
        ended_usd: of instances that ended long ago and are no longer in ``instances``.
        earlier_usd: what earlier jobs of this stack cost; spent_usd does not have it.
        nodes: at the last tick.
        attempts: starts since a gang last held, this one included.
        attempt_started_at, next_attempt_at: of the present start, and of the next; None without one.
        incomplete_since: since when some but not all nodes are in service; None otherwise.
        complete_since: since when all nodes are in service; None otherwise.
        on_demand: whether on-demand nodes stand in for the spot nodes that did not come.
        unfit_nodes: nodes that failed their set-up or tests since one last passed.
        failed_launches, interruptions, rebalance_notices: counts of this run.
        last_failure: what AWS said of the last launch that failed; empty without one.
        desired_seen: the group's desired size at the last tick that wanted nodes; 0 in a phase that wants none.
        request: the last request that was obeyed; None without one.
        instances: by instance id.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    job: str
    phase: Phase
    after: Phase | None = None
    reason: str
    since: datetime
    run_started_at: datetime
    updated_at: datetime
    spent_usd: float = 0.0
    usd_per_hour: float = 0.0
    ceiling_usd: float | None = None
    fixed_usd: float = 0.0
    ended_usd: float = 0.0
    earlier_usd: float = 0.0
    nodes: Nodes = field(default_factory=Nodes)
    attempts: int = 0
    attempt_started_at: datetime | None = None
    next_attempt_at: datetime | None = None
    incomplete_since: datetime | None = None
    complete_since: datetime | None = None
    on_demand: bool = False
    unfit_nodes: int = 0
    failed_launches: int = 0
    interruptions: int = 0
    rebalance_notices: int = 0
    last_failure: str = ""
    desired_seen: int = 0
    request: Request | None = None
    instances: dict[str, Instance] = field(default_factory=dict)

    def to_text(self) -> str:
        """The object's content."""
        return json.dumps(to_json(self), indent=1) + "\n"

    def with_phase(self, phase: Phase, reason: str, now: datetime, **changes: Any) -> State:
        """This state in another phase, from ``now`` on."""
        changes = {"after": None, "next_attempt_at": None, **changes}
        return replace(self, phase=phase, reason=reason, since=now, **changes)


class NewerStateError(FormatError):
    """A state that a newer version of the controller wrote."""


def read_state(text: str, place: str) -> State:
    """The state in an object's content.

    Raises:
        NewerStateError: it is of a later schema version, or has what this version does not know.
        FormatError: it is none.
    """
    data = _json(text, place)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerStateError(f"{place} has schema_version {version}, and this controller knows {SCHEMA_VERSION}")
    try:
        return from_json(State, data, place)
    except UnknownError as error:
        raise NewerStateError(str(error)) from error


def read_request(text: str, place: str) -> Request:
    """The request in an object's content.

    Raises:
        FormatError: it is not one.
    """
    return from_json(Request, _json(text, place), place)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"{place} is not JSON: {error}") from error
