"""What a deployed fleet does: its group and nodes, why launches failed, and what the nodes measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client

# What the nodes publish, every minute (bootstrap/README.md).
NODE_METRICS = ("GpuUtilizationPercent", "GpuMemoryUsedGiB", "TokensPerSecond")
# A value older than this says nothing of now.
METRICS_WINDOW = timedelta(minutes=15)
METRICS_PERIOD_S = 60
# DescribeScalingActivities answers with the newest first, of the last six weeks.
ACTIVITIES_READ = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One instance of the group.

    Attributes:
        lifecycle_state: Auto Scaling's word for it ("InService", "Terminating:Wait").
        lifecycle: "spot", "on-demand" or "capacity-block"; empty where EC2 did not say.
        launched_at: its last start, UTC; None where EC2 did not say.
    """

    instance_id: str
    instance_type: str
    zone: str
    lifecycle_state: str
    health: str
    protected: bool
    lifecycle: str = ""
    launched_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The Auto Scaling group: sizes in nodes."""

    name: str
    wanted: int
    smallest: int
    largest: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFailure:
    """A scaling activity that failed, in AWS's words."""

    at: datetime
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The newest value of a metric."""

    value: float
    at: datetime


def read_group(client: AutoScalingClient, name: str) -> Group | None:
    """The group with its instances; None where there is none of that name."""
    groups = client.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"]
    if not groups:
        return None
    (found,) = groups
    nodes = tuple(
        Node(
            instance_id=instance["InstanceId"],
            instance_type=instance.get("InstanceType", ""),
            zone=instance["AvailabilityZone"],
            lifecycle_state=instance["LifecycleState"],
            health=instance["HealthStatus"],
            protected=instance["ProtectedFromScaleIn"],
        )
        for instance in found["Instances"]
    )
    return Group(
        name=name,
        wanted=found["DesiredCapacity"],
        smallest=found["MinSize"],
        largest=found["MaxSize"],
        nodes=tuple(sorted(nodes, key=lambda node: node.instance_id)),
    )


def read_launches(client: EC2Client, instance_ids: Sequence[str]) -> dict[str, tuple[datetime, str]]:
    """When each instance started, and how it is bought ("on-demand" for one in a reservation, too)."""
    if not instance_ids:
        return {}
    pages = client.get_paginator("describe_instances").paginate(InstanceIds=list(instance_ids))
    return {
        instance["InstanceId"]: (instance["LaunchTime"], instance.get("InstanceLifecycle", "on-demand"))
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
    }


def read_failures(
    client: AutoScalingClient, name: str, *, since: datetime, limit: int = 5
) -> tuple[LaunchFailure, ...]:
    """The newest scaling activities that failed, each message once.

    Args:
        client: of the group's region.
        name: the group.
        since: older ones are of no interest.
        limit: how many at most.
    """
    answer = client.describe_scaling_activities(AutoScalingGroupName=name, MaxRecords=ACTIVITIES_READ)
    found: dict[str, LaunchFailure] = {}
    for activity in answer["Activities"]:
        at, message = activity["StartTime"], activity.get("StatusMessage", "")
        if activity["StatusCode"] == "Failed" and at >= since:
            found.setdefault(message, LaunchFailure(at=at, message=message))
    return tuple(found.values())[:limit]


def read_metrics(client: Any, namespace: str, names: Sequence[str], now: datetime) -> dict[str, Measured]:
    """The newest value of each metric, the mean over the nodes; none for a metric without one in a quarter of an hour.

    One GetMetricData request; AWS bills 0.01 USD for a thousand metrics (https://aws.amazon.com/cloudwatch/pricing/).
    """
    answer = client.get_metric_data(
        MetricDataQueries=[
            {
                "Id": f"m{number}",
                "MetricStat": {
                    "Metric": {"Namespace": namespace, "MetricName": name},
                    "Period": METRICS_PERIOD_S,
                    "Stat": "Average",
                },
            }
            for number, name in enumerate(names)
        ],
        StartTime=now - METRICS_WINDOW,
        EndTime=now,
        ScanBy="TimestampDescending",
    )
    found = {}
    for result in answer["MetricDataResults"]:
        if result["Values"]:
            name = names[int(result["Id"].removeprefix("m"))]
            found[name] = Measured(value=result["Values"][0], at=result["Timestamps"][0])
    return found


def with_launches(group: Group, launches: Mapping[str, tuple[datetime, str]]) -> Group:
    """The group, its nodes with what EC2 said of them."""
    nodes = (
        replace(node, launched_at=launches[node.instance_id][0], lifecycle=launches[node.instance_id][1])
        if node.instance_id in launches
        else node
        for node in group.nodes
    )
    return replace(group, nodes=tuple(nodes))
