"""Read the stack's instances from EC2, with spot prices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.settings import STACK_TAG, ControllerSettings, Lifecycle
from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.observation import Machine

# EC2 ended it at its launch: no right to the volume's key, too many volumes, no capacity:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html
_LAUNCH_FAULTS = re.compile(r"\w+\.(InternalError|InvalidSnapshot|VolumeLimitExceeded|InsufficientInstanceCapacity)")


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
