"""Read Auto Scaling's activities: what came and went in an outage of the controller, and failed launches by size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import LEASE, LEASE_ACTS
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.observation import AutoScalingGroup, FailedLaunch, Machine

# EC2 describes an ended instance for "usually less than one hour":
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html
EC2_FORGETS = timedelta(minutes=10)
# Fifty pages, about all that a tick has time for. AWS keeps six weeks.
MAX_ACTIVITIES = 5000
# Longest time from a launch's begin to its instance in EC2's answers.
LAUNCH_DELAY = timedelta(minutes=10)


def read_activities(
    clients: Clients, settings: ControllerSettings, places: Iterable[str], since: datetime | None, now: datetime
) -> tuple[list[Any], datetime | None]:
    """Return the activities of the places' groups in an outage, of deleted ones too; none without an outage.

    With them, the time before which activities are left unread, where a group has more than MAX_ACTIVITIES.
    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    activities: list[Any] = []
    unread: list[datetime] = []
    for place in places if since and now - since > EC2_FORGETS else ():
        assert since
        found, unread_until = _read_outage(clients, settings, settings.group_of(place), since, now)
        activities += found
        unread += [unread_until] if unread_until else []
    return activities, max(unread, default=None)


def _read_outage(
    clients: Clients, settings: ControllerSettings, group: str, since: datetime, now: datetime
) -> tuple[list[Any], datetime | None]:
    pages = clients.autoscaling.get_paginator("describe_scaling_activities").paginate(
        AutoScalingGroupName=group, IncludeDeletedGroups=True, PaginationConfig={"MaxItems": MAX_ACTIVITIES}
    )
    # An end that began before the outage may have ended in it.
    oldest = since - LAUNCH_DELAY - timedelta(seconds=settings.drain_s)
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


def read_failed_launches(
    clients: Clients,
    settings: ControllerSettings,
    groups: Mapping[str, AutoScalingGroup],
    since: datetime | None,
    now: datetime,
) -> tuple[FailedLaunch, ...]:
    """Return the newest launches by size that failed after ``since``; those after ``now`` are the next tick's."""
    failures = []
    for place in settings.places.keys() & groups:
        if settings.mode == "training" and not settings.places[place].by_size:
            continue
        answer = clients.autoscaling.describe_scaling_activities(AutoScalingGroupName=settings.group_of(place))
        for activity in answer["Activities"]:
            at = to_seconds(activity.get("EndTime") or activity["StartTime"])
            is_new = activity["StatusCode"] == "Failed" and (since is None or at > since) and at <= now
            if is_new and activity.get("Description", "").startswith("Launching"):
                failures.append(FailedLaunch(at=at, message=activity.get("StatusMessage", "")))
    return tuple(sorted(failures, key=lambda failure: failure.at))


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
