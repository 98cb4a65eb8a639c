"""The controller's memory between two ticks: ``control/state.json`` in the stack's bucket.

The controller alone writes it; `gpufleet status`, `stop`, `resume` and `costs` read it. Money is in USD, times are UTC.

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

from bootstrap.contract.codec import FormatError, UnknownError, as_key, from_json, parse_json, to_json
from bootstrap.contract.report import ReportState
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import Lifecycle
from bootstrap.contract.timings import SILENT

FILE = "state.json"
SCHEMA_VERSION: Literal[1] = 1

Ended = Literal["stopped", "done", "failed", "unfit", "over-budget", "block-ended"]
Phase = Literal["waiting", "starting", "running", "draining", "paused", Ended]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Phases that want nodes, and phases that want none for the time being.
UP: tuple[Phase, ...] = ("starting", "running")
PAUSES: tuple[Phase, ...] = ("waiting", "paused")
# Only a person's request, a new run, a higher ceiling (over-budget) or another purchase (block-ended) leaves these.
ENDED: tuple[Phase, ...] = get_args(Ended)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeteredInstance:
    """One instance's meter."""

    instance_type: str
    launched_at: datetime  # the (last) start
    ended_at: datetime | None = None  # end of billing; None while the instance lives
    metered_until: datetime  # spent_usd is up to this time
    lifecycle: Lifecycle
    usd_per_hour: float  # node and volume, at present
    spent_usd: float
    served: bool = False  # was ever in service
    interrupted: bool = False  # EC2 took the instance back
    rebalanced: bool = False  # EC2 said that it may
    leaving_since: datetime | None = None  # first tick that saw the terminate hook hold it
    report: ReportState | None = None  # the last of the present run
    reported_at: datetime | None = None  # time at which S3 took the last report


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCounts:
    """Nodes wanted, and members of the Auto Scaling group by state."""

    wanted: int = 0
    in_service: int = 0
    pending: int = 0
    terminating: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """control/state.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_id: str = field(metadata=as_key("run"))
    job: str
    phase: Phase
    after: Phase | None = None  # the phase that follows draining
    reason: str  # a sentence that explains the phase
    since: datetime  # start of the phase
    run_started_at: datetime  # or when the run was last begun anew
    updated_at: datetime  # the last tick
    spent_usd: float = 0.0  # by this job, with the stack's own cost
    usd_per_hour: float = 0.0
    ceiling_usd: float | None = None
    fixed_usd: float = 0.0  # cost of the stack itself since its first tick, with its unused reservation
    ended_usd: float = 0.0  # spend of instances that ended long ago and are no longer in instances
    earlier_usd: float = 0.0  # spend of the stack's earlier jobs; not part of spent_usd
    nodes: NodeCounts = field(default_factory=NodeCounts)
    attempts: int = 0  # starts since a gang last held, the present one included
    attempt_started_at: datetime | None = None
    next_attempt_at: datetime | None = None
    incomplete_since: datetime | None = None  # some but not all nodes are in service
    complete_since: datetime | None = None  # all nodes are in service
    on_demand: bool = False  # on-demand nodes stand in for the spot nodes that did not come
    unfit_nodes: int = 0  # nodes that failed their set-up or tests since one last passed
    failed_launches: int = 0  # these three are counts of the run
    interruptions: int = 0
    rebalance_notices: int = 0
    last_failure: str = ""  # AWS's message on the last launch that failed
    desired_seen: int = 0  # the group's desired size at the last tick that wanted nodes
    request: PersonRequest | None = None  # the last one that was obeyed
    instances: dict[str, MeteredInstance] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the object's content."""
        return json.dumps(to_json(self), indent=1) + "\n"

    def with_phase(self, phase: Phase, reason: str, now: datetime, **changes: Any) -> ControllerState:
        """Return this state in another phase, from ``now`` on."""
        changes = {"after": None, "next_attempt_at": None, **changes}
        return replace(self, phase=phase, reason=reason, since=now, **changes)

    def silent_s(self, now: datetime) -> float:
        """Seconds since the controller's last tick."""
        return (now - self.updated_at).total_seconds()

    def is_silent(self, now: datetime) -> bool:
        """Return whether the controller missed so many ticks that nobody meters or ends the nodes."""
        return now - self.updated_at > SILENT


class NewerStateError(FormatError):
    """A state that a newer version of the controller wrote."""


def read_state(text: str, place: str, *, lenient: bool = False) -> ControllerState:
    """Parse an object's content; ``lenient`` as in ``codec.from_json``.

    Raises:
        NewerStateError, FormatError: a newer version wrote the state; the content is none.
    """
    data = parse_json(text, place)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerStateError(f"{place} has schema_version {version}, and this version knows {SCHEMA_VERSION}")
    try:
        return from_json(ControllerState, data, place, lenient=lenient)
    except UnknownError as error:
        raise NewerStateError(str(error)) from error
