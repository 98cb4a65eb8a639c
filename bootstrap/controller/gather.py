"""Gather a tick's observation from AWS: groups, notices of the queue, machines, objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.codec import FormatError
from bootstrap.contract.ending import TERMINATE, Member
from bootstrap.contract.settings import STACK_TAG, ControllerSettings, Lifecycle, first_key
from bootstrap.contract.state import ControllerState
from bootstrap.controller.bucket import load_reports, load_request
from bootstrap.controller.clients import Clients, error_code, log, to_seconds
from bootstrap.controller.observation import AutoScalingGroup, Machine, Observation

# End of the names of EC2's notices: spot nodes, and those that a reservation's owner takes back (with a time).
INTERRUPTION = "Instance Interruption Warning"
HEALTH = "AWS Health Event"
# EC2 ended it at its launch: no right to the volume's key, too many volumes, no capacity:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_LAUNCH_FAULTS = re.compile(r"\w+\.(InternalError|InvalidSnapshot|VolumeLimitExceeded|InsufficientInstanceCapacity)")
# Batches of ten messages; an account's other instances send notices too.
QUEUE_BATCHES = 50
# "Terminating EC2 instance: i-0123456789abcdef0"; a failed launch has its reason behind the id.
_ACTIVITY = re.compile(r"(Launching|Terminating)\b.*?\b(i-[0-9a-f]+)")
_FORGOTTEN = "forgotten"
_GROUP_TAG = "aws:autoscaling:groupName"  # Auto Scaling's, of a group's instances
# Fifty pages, for which a tick has time.
MOST_ACTIVITIES = 5000

Groups = Mapping[str, AutoScalingGroup]


def gather(
    clients: Clients, settings: ControllerSettings, state: ControllerState | None, now: datetime, failures: list[str]
) -> Observation:
    """Read everything that a tick looks at; botocore's errors pass, and the queue's are added to ``failures``."""
    # First: an instance they name is then among the machines.
    interrupted, maintenance, receipts = receive_notices(clients, settings, failures)
    groups = read_groups(clients, settings)
    machines = read_machines(clients, settings, groups, state, now)
    reported_at: dict[str, datetime | None] = {it.instance_id: None for it in machines if not it.forgotten}
    if state:
        reported_at |= {key: instance.reported_at for key, instance in state.instances.items()}
    try:
        request = load_request(clients, settings)
    except FormatError as error:
        # A request that cannot be read changes nothing.
        log("unreadable", reason=str(error))
        request = state.request if state else None
    return Observation(
        groups=groups,
        machines=machines,
        interrupted=frozenset(interrupted),
        maintenance=maintenance,
        receipts=receipts,
        reports=load_reports(clients, settings, reported_at),
        request=request,
    )


def read_groups(clients: Clients, settings: ControllerSettings) -> Groups:
    """Describe the stack's groups that exist, by key (``ControllerSettings.groups``)."""
    names = settings.groups
    answer = clients.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=list(names))
    return {names[group["AutoScalingGroupName"]]: _parse_group(group) for group in answer["AutoScalingGroups"]}


def _parse_group(group: Any) -> AutoScalingGroup:
    processes = group.get("SuspendedProcesses", [])
    reasons = {process["ProcessName"]: process.get("SuspensionReason") or "User suspended" for process in processes}
    return AutoScalingGroup(
        created_at=to_seconds(group["CreatedTime"]),
        desired=group["DesiredCapacity"],
        min_size=group["MinSize"],
        max_size=group["MaxSize"],
        members=tuple(
            Member(instance_id=it["InstanceId"], state=it["LifecycleState"], protected=it["ProtectedFromScaleIn"])
            for it in group["Instances"]
        ),
        # The Pulumi program suspends AZRebalance:
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-suspend-resume-processes.html
        suspended=tuple(
            name
            for name, reason in reasons.items()
            if name == TERMINATE or not (reason.startswith("User suspended") or name == "AZRebalance")
        ),
        zones=tuple(group["AvailabilityZones"]),
    )


def receive_notices(
    clients: Clients, settings: ControllerSettings, failures: list[str]
) -> tuple[set[str], dict[str, datetime], list[str]]:
    """Return the account's interrupted instances, the times at which EC2 ends or restarts others, and receipts."""
    interrupted, maintenance, receipts = set[str](), dict[str, datetime](), list[str]()
    for _ in range(QUEUE_BATCHES):
        try:
            answer = clients.sqs.receive_message(QueueUrl=settings.queue_url, MaxNumberOfMessages=10, WaitTimeSeconds=0)
        except (ClientError, BotoCoreError) as error:
            # The queue keeps its notices, and the nodes need their tick.
            failures.append(f"notices: {error}")
            break
        if not (messages := answer.get("Messages", [])):
            break
        for message in messages:
            receipts.append(message["ReceiptHandle"])
            try:
                event = json.loads(message["Body"])
                # infra/policies/resources.py has the kinds, with AWS's pages.
                kind, detail = event["detail-type"], event["detail"]
                if kind == HEALTH and detail.get("statusCode") != "closed":
                    starts_at = to_seconds(parsedate_to_datetime(detail["startTime"]))
                    maintenance |= {entity["entityValue"]: starts_at for entity in detail.get("affectedEntities", [])}
                if kind.endswith(INTERRUPTION):
                    interrupted.add(detail["instance-id"])
                if "instance-termination-time" in detail:
                    # No page says that the metadata service tells the node, which has two minutes to save.
                    ends_at = datetime.fromisoformat(detail["instance-termination-time"].replace("Z", "+00:00"))
                    maintenance[detail["instance-id"]] = to_seconds(ends_at)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                log("unreadable", reason=f"a message is not an event: {message['Body'][:200]}")
    return interrupted, maintenance, receipts


def delete_notices(clients: Clients, settings: ControllerSettings, seen: Observation) -> None:
    """Delete counted messages, now that the state is written."""
    for start in range(0, len(seen.receipts), 10):
        batch = seen.receipts[start : start + 10]
        entries = [{"Id": str(number), "ReceiptHandle": receipt} for number, receipt in enumerate(batch)]
        clients.sqs.delete_message_batch(QueueUrl=settings.queue_url, Entries=entries)


def read_machines(
    clients: Clients, settings: ControllerSettings, groups: Groups, state: ControllerState | None, now: datetime
) -> tuple[Machine, ...]:
    """Describe the stack's instances: those that live, and at least those that have ended since the last tick.

    The groups' instances have Auto Scaling's tag, which nobody can take off. A node that a person detached "continues
    running and incurring charges", and has the stack's tag alone:
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-tagging.html
    https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-detach-attach-instances.html
    """
    pages = clients.ec2.get_paginator("describe_instances")
    instances: dict[str, Any] = {}
    try:
        instances = _read_forgotten(clients, settings, groups, state, now) if state and state.is_silent(now) else {}
    except ClientError as error:
        # A permissions boundary of before may lack it, and nodes need their ticks. Known ones count to their lease.
        if error_code(error) != "AccessDenied":
            raise
        log("unreadable", reason=f"no scaling activities: {error}")
    instances |= {
        instance["InstanceId"]: instance
        for tag, values in ((STACK_TAG, [settings.stack]), (_GROUP_TAG, list(settings.groups)))
        for page in pages.paginate(Filters=[{"Name": f"tag:{tag}", "Values": values}])
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    }
    types = {instance["InstanceType"] for instance in instances.values() if instance.get("InstanceLifecycle") == "spot"}
    prices = _read_spot_prices(clients, sorted(types), state.updated_at if state else now, now) if types else {}
    return tuple(_parse_machine(settings, instance, prices) for instance in instances.values())


def _read_forgotten(
    clients: Clients, settings: ControllerSettings, groups: Groups, state: ControllerState, now: datetime
) -> dict[str, Any]:
    """Describe, as EC2 did for up to an hour, instances that ended in an outage, by Auto Scaling's activities.

    AWS keeps these for six weeks: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DescribeScalingActivities.html
    """
    forgotten: dict[str, Any] = {}
    # A node's last checkpoint may have begun before that tick.
    since = state.updated_at - timedelta(seconds=settings.drain_s)
    pages: Any = clients.autoscaling.get_paginator("describe_scaling_activities")
    for key, group in groups.items():
        place, asked = settings.places.get(key), {"AutoScalingGroupName": settings.group_of(key)}
        found = pages.paginate(**asked, IncludeDeletedGroups=True, PaginationConfig={"MaxItems": MOST_ACTIVITIES})
        # The newest come first, behind those in progress, and an instance's end before its launch.
        for number, activity in enumerate(activity for page in found for activity in page["Activities"]):
            if activity["StartTime"] < since and "EndTime" in activity:
                break
            if number + 1 == MOST_ACTIVITIES:
                log("unreadable", reason=f"{key}: no node before {activity['StartTime']} that no tick saw is metered")
            ended_at, named = to_seconds(activity.get("EndTime", now)), _ACTIVITY.match(activity.get("Description", ""))
            if named is None or activity["StartTime"] < since or ended_at <= state.updated_at:
                continue
            what, instance_id = named.groups()
            # An instance that EC2 ended at its launch has no other activity.
            if what == "Terminating" or activity["StatusCode"] in ("Cancelled", "Failed"):
                known = state.instances.get(instance_id)
                forgotten.setdefault(instance_id, {
                    "InstanceId": instance_id,
                    "InstanceType": known.instance_type if known else place.instance_type if place else "",
                    "InstanceLifecycle": known.lifecycle if known else place.purchase if place else "",
                    "LaunchTime": state.updated_at,
                    "Placement": {"AvailabilityZone": next(iter(group.zones), "")},
                    "State": {"Name": _FORGOTTEN},
                    "Tags": [{"Key": _GROUP_TAG, "Value": settings.group_of(key)}],
                    "StateTransitionReason": f"({ended_at:%Y-%m-%d %H:%M:%S} UTC)",
                })  # fmt: skip
            if what == "Launching" and instance_id in forgotten:
                forgotten[instance_id]["LaunchTime"] = activity["StartTime"]
    return forgotten


def _read_spot_prices(
    clients: Clients, types: list[str], since: datetime, now: datetime
) -> dict[tuple[str, str], float]:
    # Highest USD per hour since the last tick, by zone name and type. The answer has the price at the start, too:
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html
    prices: dict[tuple[str, str], float] = {}
    query: Any = {"InstanceTypes": types, "ProductDescriptions": ["Linux/UNIX"], "StartTime": since, "EndTime": now}
    try:
        pages = clients.ec2.get_paginator("describe_spot_price_history").paginate(**query)
        for entry in (entry for page in pages for entry in page["SpotPriceHistory"]):
            pool = entry["AvailabilityZone"], entry["InstanceType"]
            prices[pool] = max(prices.get(pool, 0.0), float(entry["SpotPrice"]))
    except (ClientError, BotoCoreError) as error:
        # The plan's prices count instead.
        log("unreadable", reason=f"no spot prices: {error}")
    return {pool: usd for pool, usd in prices.items() if usd}


def _parse_machine(
    settings: ControllerSettings, instance: Any, spot_prices: Mapping[tuple[str, str], float]
) -> Machine:
    state, own = instance["State"]["Name"], instance.get("InstanceLifecycle")
    reason = instance.get("StateReason", {})
    lifecycle: Lifecycle = own if own in ("spot", "capacity-block") else "on-demand"
    zone = instance.get("Placement", {}).get("AvailabilityZone", "")
    usd = spot_prices.get((zone, instance["InstanceType"])) if lifecycle == "spot" else None
    group = {"Key": _GROUP_TAG, "Value": settings.group_of(first_key(settings.own_place))}
    if settings.owned and group in instance.get("Tags", ()):
        # All nodes of that group are in the reservation. EC2 names it only while they live.
        usd = settings.owned.usd_per_hour
    # "User initiated (2026-11-21 16:00:00 GMT)"; a reclaimed spot instance has none.
    ended_at = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)", instance.get("StateTransitionReason", ""))
    return Machine(
        instance_id=instance["InstanceId"],
        instance_type=instance["InstanceType"],
        lifecycle=lifecycle,
        launched_at=to_seconds(instance["LaunchTime"]),
        # The others are billed; a stopped node counts as a running one:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html
        ended=state in ("shutting-down", "terminated", _FORGOTTEN),
        forgotten=state == _FORGOTTEN,
        until=datetime.fromisoformat(ended_at[1]).replace(tzinfo=UTC) if ended_at else None,
        reclaimed=reason.get("Code", "").startswith("Server.Spot"),
        launch_fault=reason.get("Message", "") if _LAUNCH_FAULTS.match(reason.get("Code", "")) else "",
        usd_per_hour=usd,
        subnet=instance.get("SubnetId", ""),
    )
