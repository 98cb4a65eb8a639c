"""Read Auto Scaling's activities: what came and went in an outage of the controller, and failed launches by size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
# Fifty pages of a group, about all that a tick has time for. AWS keeps six weeks.
MAX_ACTIVITIES = 5000
# Longest time from a launch's begin to its instance in EC2's answers.
LAUNCH_DELAY = timedelta(minutes=10)


def find_missed_machines(
    clients: Clients,
    settings: ControllerSettings,
    places: Iterable[str],
    state: ControllerState | None,
    machines: Iterable[Machine],
    now: datetime,
) -> tuple[Machine, ...]:
    """Return the instances of the places' groups that ended in an outage and that EC2 describes no more.

    "Launching a new EC2 instance: i-..." begins before billing, "Terminating EC2 instance: i-..." ends after.
    """
    if state is None or now - state.updated_at <= EC2_FORGETS:
        return ()
    described = {machine.instance_id for machine in machines}
    launched: dict[str, datetime] = {}
    ended: dict[str, datetime] = {}
    for activity in _read_activities(clients, settings, places, state.updated_at):
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
    known = {key: instance for key, instance in state.instances.items() if not instance.ended_at}
    return tuple(
        Machine(
            instance_id=key,
            # Without a type the dearest price counts.
            instance_type=known[key].instance_type if key in known else "",
            lifecycle=known[key].lifecycle if key in known else "on-demand",
            usd_per_hour=known[key].usd_per_hour - settings.volume_usd_per_node_hour if key in known else None,
            launched_at=known[key].launched_at if key in known else launched[key],
            running=False,
            ended=True,
            until=until,
        )
        for key, until in sorted(ended.items())
        if key in known or (key in launched and key not in state.instances)
    )


def _read_activities(
    clients: Clients, settings: ControllerSettings, places: Iterable[str], since: datetime
) -> Iterator[Any]:
    """Read the activities since an outage began, of deleted groups of these names too.

    https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    # An end that began before the outage may have ended in it.
    oldest = since - LAUNCH_DELAY - timedelta(seconds=settings.drain_s)
    for place in places:
        for page in clients.autoscaling.get_paginator("describe_scaling_activities").paginate(
            AutoScalingGroupName=settings.group_of(place),
            IncludeDeletedGroups=True,
            PaginationConfig={"MaxItems": MAX_ACTIVITIES},
        ):
            yield from page["Activities"]
            # Activities in progress come first, however old.
            starts = [activity["StartTime"] for activity in page["Activities"] if activity.get("EndTime")]
            if starts and min(starts) < oldest:
                break


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
