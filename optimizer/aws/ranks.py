"""Ranks of a fleet's nodes, as torchrun counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimizer.aws.actuals import DeployedGroup

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client


def read_ranks(client: EC2Client, group: DeployedGroup) -> list[str]:
    """Return the ids of the running nodes in service, by rank.

    torchrun's c10d rendezvous sorts the nodes by their addresses, as text (``_mark_rendezvous_complete`` of
    torch.distributed.elastic.rendezvous.dynamic_rendezvous), and bootstrap/agent gives it the private address.
    """
    serving = [node.instance_id for node in group.nodes if node.lifecycle_state == "InService"]
    if not serving:
        return []
    pages = client.get_paginator("describe_instances").paginate(InstanceIds=serving)
    running = [
        (instance["PrivateIpAddress"], instance["InstanceId"])
        for page in pages
        for reservation in page["Reservations"]
        for instance in reservation["Instances"]
        if instance["State"]["Name"] == "running"
    ]
    return [instance_id for _, instance_id in sorted(running)]
