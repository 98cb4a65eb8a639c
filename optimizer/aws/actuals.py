"""Read a deployed fleet's group, nodes and failed launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bootstrap.contract.ending import Member
from optimizer.aws.paging import filters, instances

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient
    from mypy_boto3_ec2 import EC2Client

# AWS lists the newest first, of the last six weeks.
ACTIVITIES_READ = 100
FAILURES_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedNode:
    """An instance of the group; EC2 adds lifecycle and the last start."""

    instance_id: str
    instance_type: str
    zone: str
    lifecycle_state: str
    health: str
    protected: bool
    lifecycle: str = ""  # "spot", "on-demand", "capacity-block"
    launched_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedGroup:
    """An Auto Scaling group of the stack, or all as one."""

    name: str
    wanted: int
    smallest: int
    nodes: tuple[DeployedNode, ...]

    @property
    def members(self) -> list[Member]:
        """The nodes, for the rules of a drain."""
        return [Member(instance_id=n.instance_id, state=n.lifecycle_state, protected=n.protected) for n in self.nodes]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFailure:
    """A failed scaling activity, with AWS's message."""

    at: datetime
    message: str


def read_groups(client: AutoScalingClient, names: Sequence[str]) -> list[DeployedGroup]:
    """Describe those of the stack's groups that exist, in the order of ``names``."""
    answer = client.describe_auto_scaling_groups(AutoScalingGroupNames=list(names))["AutoScalingGroups"]
    return sorted(map(_parse_group, answer), key=lambda group: names.index(group.name))


def read_group(client: AutoScalingClient, names: Sequence[str]) -> DeployedGroup | None:
    """Describe the stack's groups as one, with the name and bounds of the plan's own; None where none exists."""
    groups = read_groups(client, names)
    if not groups:
        return None
    nodes = sorted((node for group in groups for node in group.nodes), key=lambda node: node.instance_id)
    return replace(groups[0], wanted=sum(group.wanted for group in groups), nodes=tuple(nodes))


def _parse_group(group: Any) -> DeployedGroup:
    nodes = [
        DeployedNode(
            instance_id=instance["InstanceId"],
            instance_type=instance.get("InstanceType", ""),
            zone=instance["AvailabilityZone"],
            lifecycle_state=instance["LifecycleState"],
            health=instance["HealthStatus"],
            protected=instance["ProtectedFromScaleIn"],
        )
        for instance in group["Instances"]
    ]
    return DeployedGroup(
        name=group["AutoScalingGroupName"],
        wanted=group["DesiredCapacity"],
        smallest=group["MinSize"],
        nodes=tuple(sorted(nodes, key=lambda node: node.instance_id)),
    )


def read_launches(client: EC2Client, groups: Sequence[str]) -> dict[str, tuple[datetime, str]]:
    """Return each instance's start and lifecycle ("on-demand" in a reservation, too).

    The groups' tag selects them: asked by ids, EC2 refuses all where it does not know one id yet
    (https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html).
    """
    of_groups = filters({"tag:aws:autoscaling:groupName": groups})
    return {
        instance["InstanceId"]: (instance["LaunchTime"], instance.get("InstanceLifecycle", "on-demand"))
        for instance in instances(client, Filters=of_groups)
    }


def read_ranks(client: EC2Client, group: DeployedGroup) -> list[str]:
    """Return the ids of the running nodes in service, by rank.

    torchrun's c10d rendezvous sorts the nodes by their addresses, as text (``_mark_rendezvous_complete`` of
    torch.distributed.elastic.rendezvous.dynamic_rendezvous), and bootstrap/agent gives it the private address.
    """
    serving = [node.instance_id for node in group.nodes if node.lifecycle_state == "InService"]
    if not serving:
        return []
    running = (node for node in instances(client, InstanceIds=serving) if node["State"]["Name"] == "running")
    return [node["InstanceId"] for node in sorted(running, key=lambda node: node["PrivateIpAddress"])]


def read_failures(client: AutoScalingClient, names: Sequence[str], *, since: datetime) -> tuple[LaunchFailure, ...]:
    """Return the newest failed scaling activities of the stack's groups, each message once."""
    failures: dict[str, LaunchFailure] = {}
    for group in read_groups(client, names):
        answer = client.describe_scaling_activities(AutoScalingGroupName=group.name, MaxRecords=ACTIVITIES_READ)
        for activity in answer["Activities"]:
            at, message = activity["StartTime"], activity.get("StatusMessage", "")
            if activity["StatusCode"] == "Failed" and at >= since:
                failures.setdefault(message, LaunchFailure(at=at, message=message))
    return tuple(sorted(failures.values(), key=lambda failure: failure.at, reverse=True))[:FAILURES_SHOWN]


def with_launches(group: DeployedGroup, launches: Mapping[str, tuple[datetime, str]]) -> DeployedGroup:
    """Add each node's start and lifecycle."""
    launched = [(node, *launches.get(node.instance_id, (None, ""))) for node in group.nodes]
    return replace(group, nodes=tuple(replace(node, launched_at=at, lifecycle=kind) for node, at, kind in launched))
