"""Read Auto Scaling's activities: failed launches, and instances that ended during an outage of the controller."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import LEASE, LEASE_ACTS
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.observation import FailedLaunch, Machine

# EC2 describes an ended instance for "usually less than one hour":
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html
EC2_FORGETS = timedelta(minutes=10)
# Fifty pages, about all that a tick has time for. AWS keeps six weeks.
MAX_ACTIVITIES = 5000
# Error codes of a mixed group ("Could not launch Spot Instances. UnfulfillableCapacity - ..."), and the sentences of a
# group with one purchase option, where EC2 has no capacity ("Insufficient capacity." alone, too), the zone lacks the
# type, the reservation is full or the account's quota is reached:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ts-as-capacity.html
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
# https://github.com/aws/aws-parallelcluster/issues/618
# https://github.com/aws/karpenter-provider-aws/pull/2147
POOL_EMPTY = re.compile(
    r"InsufficientInstanceCapacity|InsufficientHostCapacity|UnfulfillableCapacity|Insufficient capacity"
    r"|do not have sufficient .*capacity|no Spot capacity available|not supported in your requested Availability Zone"
)
NO_ROOM = re.compile(
    r"ReservationCapacityExceeded|sufficient compatible and available capacity"
    r"|MaxSpotInstanceCountExceeded|VcpuLimitExceeded|InstanceLimitExceeded"
    r"|more vCPU capacity than your current vCPU limit|Max spot instance count exceeded"
)
# Longest time from a launch's begin to its instance in EC2's answers.
LAUNCH_DELAY = timedelta(minutes=10)


def read_activities(
    clients: Clients, settings: ControllerSettings, since: datetime | None, now: datetime
) -> tuple[list[Any], datetime | None]:
    """Return the activities since the last tick; after an outage, those of deleted groups of that name too.

    With it, the time before which activities of the outage are left unread, where there are more than MAX_ACTIVITIES.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    outage = since is not None and now - since > EC2_FORGETS
    pages = clients.autoscaling.get_paginator("describe_scaling_activities").paginate(
        AutoScalingGroupName=settings.group,
        IncludeDeletedGroups=outage,
        PaginationConfig={"MaxItems": MAX_ACTIVITIES},
    )
    # An end that began before the outage may have ended in it.
    oldest = (since or now) - LAUNCH_DELAY - timedelta(seconds=settings.drain_s if outage else 0)
    activities: list[Any] = []
    read_since = now
    for page in pages:
        activities += page["Activities"]
        # Activities in progress come first, however old: in their launch hook the first pages may have no others.
        starts = (activity["StartTime"] for activity in page["Activities"] if activity.get("EndTime"))
        read_since = min(starts, default=read_since)
        if read_since < oldest:
            return activities, None
    return activities, to_seconds(read_since) if pages.resume_token else None


def find_failed_launches(activities: Iterable[Any], since: datetime | None, now: datetime) -> tuple[FailedLaunch, ...]:
    """Return the launches that failed after ``since``, in order; those after ``now`` are the next tick's."""
    failures = []
    for activity in activities:
        at = to_seconds(activity.get("EndTime") or activity["StartTime"])
        is_launch = activity.get("Description", "").startswith("Launching")
        if activity["StatusCode"] == "Failed" and is_launch and (since is None or at > since) and at <= now:
            message, began_at = activity.get("StatusMessage", ""), to_seconds(activity["StartTime"])
            failures.append(to_failed_launch(message, at=at, began_at=began_at, subnet=_subnet(activity)))
    return tuple(sorted(failures, key=lambda failure: failure.at))


def to_failed_launch(message: str, *, at: datetime, began_at: datetime, subnet: str) -> FailedLaunch:
    """Tell from AWS's message whether capacity lacks, and where."""
    empty = POOL_EMPTY.search(message) is not None
    no_capacity = empty or NO_ROOM.search(message) is not None
    return FailedLaunch(
        at=at, message=message, no_capacity=no_capacity, began_at=began_at, subnet=subnet if empty else ""
    )


def _subnet(activity: Any) -> str:
    # "Details": "{\"Subnet ID\":\"subnet-5ea0c127\",\"Availability Zone\":\"us-west-2a\"}", of a refused launch too:
    # https://docs.aws.amazon.com/cli/latest/reference/autoscaling/describe-scaling-activities.html
    # https://github.com/aws/aws-parallelcluster/issues/1944
    match = re.search(r'"Subnet ID"\s*:\s*"(subnet-[0-9a-f]+)"', activity.get("Details") or "")
    return match[1] if match else ""


def find_missed_machines(
    settings: ControllerSettings,
    activities: Iterable[Any],
    state: ControllerState | None,
    machines: Iterable[Machine],
    now: datetime,
    unread_until: datetime | None,
) -> tuple[Machine, ...]:
    """Return the instances that ended during an outage and that EC2 describes no more.

    "Launching a new EC2 instance: i-..." begins before billing, "Terminating EC2 instance: i-..." ends after. One
    machine more, at the price of all that can run, stands for those whose launches are unread.
    """
    if state is None or now - state.updated_at <= EC2_FORGETS:
        return ()
    described = {machine.instance_id for machine in machines}
    launched: dict[str, datetime] = {}
    ended: dict[str, datetime] = {}
    for activity in activities:
        match = re.match(r"(Launching|Terminating)\b.*\b(i-[0-9a-f]+)", activity.get("Description", ""))
        if match is None or match[2] in described:
            continue
        started = to_seconds(activity["StartTime"])
        if match[1] == "Launching" and started > state.updated_at - LAUNCH_DELAY:
            launched[match[2]] = started
        # An instance that EC2 ended at its launch has no other activity: "Launching a new EC2 instance: i-... . Status
        # Reason: Instance became unhealthy ...": https://github.com/boxfuse/boxfuse-issues/issues/204
        if match[1] == "Terminating" or activity["StatusCode"] in ("Cancelled", "Failed"):
            ended.setdefault(match[2], min(to_seconds(activity.get("EndTime") or now), now))
    lease = LEASE + LEASE_ACTS + timedelta(seconds=settings.drain_s)
    for key, began in launched.items():
        # Nothing tells its end: as one that is known (meter.py). A fresh one EC2 may not describe yet.
        if key not in state.instances and began < now - LAUNCH_DELAY:
            ended.setdefault(key, min(began + lease, now))
    # The type is unknown: the dearest.
    ended_machine = Machine(
        instance_id=f"unread-since-{state.updated_at:%Y%m%dT%H%M%SZ}",
        instance_type="",
        lifecycle="on-demand",
        launched_at=state.updated_at,
        running=False,
        ended=True,
        until=unread_until,
    )
    missed = []
    for key in sorted(ended):
        known = state.instances.get(key)
        launched_at = known.launched_at if known else launched.get(key, unread_until)
        if launched_at is None or (known and known.ended_at):
            continue
        one = replace(ended_machine, instance_id=key, launched_at=launched_at, until=ended[key])
        if known:
            usd = known.usd_per_hour - settings.volume_usd_per_node_hour
            one = replace(one, instance_type=known.instance_type, lifecycle=known.lifecycle, usd_per_hour=usd)
        missed.append(one)
    if unread_until and unread_until > state.updated_at:
        # A node that leaves is billed beside the one that takes its place.
        usd = 2 * settings.node_count * settings.usd_per_hour("on-demand", "") - settings.volume_usd_per_node_hour
        missed.append(replace(ended_machine, usd_per_hour=usd))
    return tuple(missed)
