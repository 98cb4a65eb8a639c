"""Gather a tick's observation from AWS."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bootstrap.contract.codec import FormatError
from bootstrap.contract.ending import TERMINATE, Member
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.start_reservation import ONLY
from bootstrap.contract.state import ControllerState
from bootstrap.controller.actions import LAUNCH
from bootstrap.controller.activities import find_failed_launches, find_missed_machines, read_activities
from bootstrap.controller.bucket import load_reports, load_request
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.machines import read_machines
from bootstrap.controller.notices import INTERRUPTION, REBALANCE, receive_notices
from bootstrap.controller.observation import AutoScalingGroup, Observation, Target
from bootstrap.controller.reserve import reserve
from bootstrap.controller.scores import read_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """An observation and its loose ends."""

    seen: Observation
    receipts: list[str]  # of notices to delete once the state is written
    problems: list[str]  # objects, messages and prices that could not be read


def gather(clients: Clients, settings: ControllerSettings, state: ControllerState | None, now: datetime) -> Gathered:
    """Read everything that a tick looks at; botocore's errors pass."""
    problems: list[str] = []
    since = state.updated_at if state else None
    # First: an instance they name is then among the machines.
    notices, receipts = receive_notices(clients, settings, problems)
    group = read_group(clients, settings)
    answer = reserve(clients, settings, state, group.tags if group else {}, now, problems)
    machines = read_machines(clients, settings, state, now, problems)
    activities, unread_until = read_activities(clients, settings, since, now) if group else ([], None)
    if unread_until:
        problems.append(f"too many scaling activities: the outage until {unread_until} counts at its highest cost")
    missed = find_missed_machines(settings, activities, state, machines, now, unread_until)
    reported_at: dict[str, datetime | None] = {machine.instance_id: None for machine in (*machines, *missed)}
    if state:
        reported_at |= {key: instance.reported_at for key, instance in state.instances.items()}
    try:
        request = load_request(clients, settings) or _first_request(settings)
    except FormatError as error:
        # A request that cannot be read changes nothing.
        problems.append(str(error))
        request = state.request if state else None
    seen = Observation(
        group=group,
        machines=machines,
        missed=missed,
        interrupted=frozenset(notices[INTERRUPTION]),
        rebalanced=frozenset(notices[REBALANCE]),
        reports=load_reports(clients, settings, reported_at, problems),
        failed_launches=(*find_failed_launches(activities, since, now), *([answer.refused] if answer.refused else [])),
        request=request,
        scores=read_scores(clients, settings, state, now, problems),
        reservations=answer.reservations,
        owned_free=answer.owned_free,
        reservation_refused=answer.refused,
    )
    return Gathered(seen=seen, receipts=receipts, problems=problems)


def _first_request(settings: ControllerSettings) -> PersonRequest | None:
    """Request in place of the one that nobody has written yet."""
    if not settings.waits:
        return None
    return PersonRequest(schema_version=1, want="stop", at=datetime(2000, 1, 1, tzinfo=UTC), by="gpufleet:waits")


def read_group(clients: Clients, settings: ControllerSettings) -> AutoScalingGroup | None:
    """Describe the stack's group, if there is one."""
    answer = clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[settings.group])
    if not answer["AutoScalingGroups"]:
        return None
    group: Any = answer["AutoScalingGroups"][0]
    policy = group.get("MixedInstancesPolicy", {})
    distribution = policy.get("InstancesDistribution")
    overrides = policy.get("LaunchTemplate", {}).get("Overrides", [])
    reserved = group.get("CapacityReservationSpecification", {})
    processes = group.get("SuspendedProcesses", [])
    suspended = {one["ProcessName"]: _is_by_aws(one.get("SuspensionReason")) for one in processes}
    return AutoScalingGroup(
        created_at=to_seconds(group["CreatedTime"]),
        desired=group["DesiredCapacity"],
        min_size=group["MinSize"],
        max_size=group["MaxSize"],
        on_demand_base=None if distribution is None else int(distribution.get("OnDemandBaseCapacity") or 0),
        members=tuple(
            Member(instance_id=one["InstanceId"], state=one["LifecycleState"], protected=one["ProtectedFromScaleIn"])
            for one in group["Instances"]
        ),
        subnets=frozenset(filter(None, group.get("VPCZoneIdentifier", "").split(","))),
        instance_types=tuple(one["InstanceType"] for one in overrides if "InstanceType" in one),
        target=Target(
            reservation_ids=tuple(
                sorted(reserved.get("CapacityReservationTarget", {}).get("CapacityReservationIds", []))
            ),
            only=reserved.get("CapacityReservationPreference") == ONLY,
        ),
        suspended=tuple(name for name, by_aws in suspended.items() if by_aws),
        launches_off=suspended.get(LAUNCH) is False,
        ends_off=TERMINATE in suspended,
        warm_pool="WarmPoolConfiguration" in group,
        tags={tag["Key"]: tag["Value"] for tag in group["Tags"]},
    )


def _is_by_aws(reason: str | None) -> bool:
    """Return whether Auto Scaling suspended a process; others' reasons are "User suspended at" a time.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html
    """
    return bool(reason) and not str(reason).startswith("User suspended")
