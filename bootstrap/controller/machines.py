"""Read the stack's instances from EC2, with spot prices, and from Auto Scaling those that EC2 describes no more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.settings import STACK_TAG, ControllerSettings, Lifecycle
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import LEASE, LEASE_ACTS
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.observation import Machine

# EC2 ended it at its launch: no right to the volume's key, too many volumes, no capacity:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_LAUNCH_FAULTS = re.compile(r"\w+\.(InternalError|InvalidSnapshot|VolumeLimitExceeded|InsufficientInstanceCapacity)")
# EC2 describes an ended instance for "usually less than one hour":
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html
EC2_FORGETS = timedelta(minutes=10)
# Fifty pages of a group, about all that a tick has time for. AWS keeps six weeks.
MAX_ACTIVITIES = 5000
# Longest time from a launch's begin to its instance in EC2's answers.
LAUNCH_DELAY = timedelta(minutes=10)


def read_machines(
    clients: Clients, settings: ControllerSettings, state: ControllerState | None, now: datetime, problems: list[str]
) -> tuple[Machine, ...]:
    """Describe the groups' instances, by Auto Scaling's tag; ended ones for about an hour.

    https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-tagging.html
    """
    instances = _describe(clients, "aws:autoscaling:groupName", *settings.groups)
    known = state.instances if state else {}
    lost = {key for key, instance in known.items() if not instance.ended_at} - {
        instance["InstanceId"] for instance in instances
    }
    if lost:
        # A node that a person detached "continues running and incurring charges":
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-detach-attach-instances.html
        detached = [
            instance for instance in _describe(clients, STACK_TAG, settings.stack) if instance["InstanceId"] in lost
        ]
        problems += [
            f"{instance['InstanceId']} is no longer in the group, and counts until it ends" for instance in detached
        ]
        instances += detached
    spot = {instance["InstanceType"] for instance in instances if instance.get("InstanceLifecycle") == "spot"}
    prices = _read_spot_prices(clients, sorted(spot), state.updated_at if state else now, now, problems) if spot else {}
    return tuple(_parse_machine(settings, instance, prices) for instance in instances)


def _describe(clients: Clients, tag: str, *values: str) -> list[Any]:
    pages = clients.ec2.get_paginator("describe_instances").paginate(
        Filters=[{"Name": f"tag:{tag}", "Values": list(values)}]
    )
    return [instance for page in pages for reservation in page["Reservations"] for instance in reservation["Instances"]]


def _read_spot_prices(
    clients: Clients, types: list[str], since: datetime, now: datetime, problems: list[str]
) -> dict[tuple[str, str], float]:
    # Highest USD per hour since the last tick, by zone name and instance type. The answer has the price in effect at
    # the start, too:
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    prices: dict[tuple[str, str], float] = {}
    query: Any = {"InstanceTypes": types, "ProductDescriptions": ["Linux/UNIX"], "StartTime": since, "EndTime": now}
    try:
        for page in clients.ec2.get_paginator("describe_spot_price_history").paginate(**query):
            for entry in page["SpotPriceHistory"]:
                pool, usd = (entry["AvailabilityZone"], entry["InstanceType"]), float(entry["SpotPrice"])
                if usd > prices.get(pool, 0.0):
                    prices[pool] = usd
    except (ClientError, BotoCoreError) as error:
        # The plan's prices count instead.
        problems.append(f"no spot prices: {error}")
    return prices


def _parse_machine(
    settings: ControllerSettings, instance: Any, spot_prices: Mapping[tuple[str, str], float]
) -> Machine:
    state, own = instance["State"]["Name"], instance.get("InstanceLifecycle")
    reason = instance.get("StateReason", {})
    lifecycle: Lifecycle = own if own in ("spot", "capacity-block") else "on-demand"
    zone = instance.get("Placement", {}).get("AvailabilityZone", "")
    usd = spot_prices.get((zone, instance["InstanceType"])) if lifecycle == "spot" else None
    if settings.owned and instance.get("CapacityReservationId") == settings.owned.reservation_id:
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Instance.html
        usd = settings.owned.usd_per_hour
    return Machine(
        instance_id=instance["InstanceId"],
        instance_type=instance["InstanceType"],
        lifecycle=lifecycle,
        launched_at=to_seconds(instance["LaunchTime"]),
        # Only these two are billed:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
        running=state in ("pending", "running"),
        ended=state in ("shutting-down", "terminated"),
        until=_parse_transition(instance.get("StateTransitionReason", "")),
        reclaimed=reason.get("Code", "").startswith("Server.Spot"),
        launch_fault=reason.get("Message", "") if _LAUNCH_FAULTS.match(reason.get("Code", "")) else "",
        usd_per_hour=usd,
        subnet=instance.get("SubnetId", ""),
    )


def _parse_transition(text: str) -> datetime | None:
    # "User initiated (2026-11-21 16:00:00 GMT)"; a reclaimed spot instance has none.
    match = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", text)
    return datetime.fromisoformat(match[1]).replace(tzinfo=UTC) if match else None


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
