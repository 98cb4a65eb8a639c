"""All that is read of a deployed stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from bootstrap.contract.measured import MeasuredRow
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.staging import copied_gib
from bootstrap.contract.state import ControllerState
from infra.naming import Names
from optimizer.aws import actuals, clients, control, errors
from optimizer.aws.actuals import DeployedGroup, LaunchFailure
from optimizer.aws.log_group import NodeMinute, read_copies, read_gpus
from optimizer.aws.training import TrainingProgress, read_measured, read_progress
from optimizer.contract.errors import DataMissingError, GpufleetError

T = TypeVar("T")

FAILURES_WINDOW = timedelta(hours=24)


@dataclass(kw_only=True)
class Reading:
    """Parts of a deployed stack, None or empty where absent; ``unread`` has why a part cannot be read."""

    at: datetime
    state: ControllerState | None = None
    request: PersonRequest | None = None
    group: DeployedGroup | None = None
    detached: tuple[str, ...] = ()  # instances that the controller meters, and that left the group
    failures: tuple[LaunchFailure, ...] = ()
    progress: TrainingProgress | None = None
    measured: MeasuredRow | None = None  # newest of the present run
    gpus: Mapping[str, tuple[NodeMinute, ...]] = field(default_factory=dict)  # last minutes by instance id
    copies: Mapping[str, str] = field(default_factory=dict)  # progress of staging by instance id
    unread: dict[str, str] = field(default_factory=dict)

    def slowest_copy(self) -> str:
        """Progress of the node whose copy of the data is least complete; empty where no node copies."""
        if not self.copies:
            return ""
        slowest = min(self.copies.values(), key=lambda line: copied_gib(line) or 0.0)
        return f"{slowest.removeprefix('data: ')}, the slowest of {len(self.copies)} nodes"

    def attempt(self, part: str, call: Callable[[], T], otherwise: T) -> T:
        """Return ``call()``, or ``otherwise`` with an entry in ``unread``."""
        try:
            return call()
        except (GpufleetError, *errors.AWS_ERRORS) as error:
            self.unread[part] = errors.reason(error)
        return otherwise


def read(names: Names, now: datetime) -> Reading:
    """Read each part of a stack; without group and state it is a DataMissingError."""
    reading = Reading(at=now)
    region, bucket, prefix = names.region, names.bucket, names.control_prefix
    s3, autoscaling = clients.s3(region), clients.autoscaling(region)
    reading.group = reading.attempt("group", lambda: actuals.read_group(autoscaling, names.groups), None)
    reading.state = reading.attempt("state", lambda: control.read_state(s3, bucket, prefix), None)
    if reading.group is None and "group" not in reading.unread and reading.state is None:
        raise DataMissingError(
            f"stack {names.stack} has no Auto Scaling group {names.group} in {region} of account {names.account_id}",
            why=reading.unread.get("state", ""),
            next_step=f"pulumi up --stack {names.stack}, or use the credentials of the account it is in",
        )
    reading.request = reading.attempt("request", lambda: control.read_request(s3, bucket, prefix), None)
    reading.progress = reading.attempt("progress", lambda: read_progress(s3, bucket, names.checkpoint_prefix), None)
    if reading.state is not None:
        run_id, none = reading.state.run_id, (list[MeasuredRow](), dict[str, str]())
        rows, unread = reading.attempt(
            "measured runs", lambda: read_measured(s3, bucket, names.checkpoint_prefix, run_id=run_id), none
        )
        reading.measured = rows[-1] if rows else None
        reading.unread |= unread
    if reading.group is not None:
        ec2 = clients.ec2(region)
        launches = reading.attempt("instances", lambda: actuals.read_launches(ec2, names.groups), None)
        reading.group = actuals.with_launches(reading.group, launches or {})
        if launches is not None and reading.state and not reading.state.is_silent(now):
            alive = [key for key, instance in reading.state.instances.items() if not instance.ended_at]
            reading.detached = tuple(sorted(set(alive) - launches.keys()))
        since = now - FAILURES_WINDOW
        reading.failures = reading.attempt(
            "failed launches", lambda: actuals.read_failures(autoscaling, names.groups, since=since), ()
        )
    logs = clients.logs(region)
    reading.gpus = reading.attempt("GPUs", lambda: read_gpus(logs, names.log_group, now), {})
    if reading.group is not None and any(node.lifecycle_state.startswith("Pending") for node in reading.group.nodes):
        reading.copies = reading.attempt("copies of the data", lambda: read_copies(logs, names.log_group, now), {})
    return reading
