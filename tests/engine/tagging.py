"""Tags on everything that a stack made, read service by service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.engine.deployment import Deployment
from tests.engine.facts import ACCOUNT
from tests.engine.inventory import Client, Inventory, inventory, left_behind

Reader = Callable[[str], dict[str, str]]
"""Tags of a resource, by its id as the inventory has it."""

UNTAGGABLE = ("key alias", "subscription")
MADE_BY_AWS = ("instance", "network interface", "security group rule", "volume")
"""Kinds of which AWS makes some itself: an endpoint's and a gateway's interfaces, a new group's first rule; and nodes,
whose tags are in the launch template (``facts.check_template``)."""


def _tags_by_call(call: Callable[..., Any], parameter: str, field: str) -> Reader:
    """Reader of a resource's tags: ``call`` with the resource's name or ARN as ``parameter`` answers with ``field``."""

    def read(item: str) -> dict[str, str]:
        return _plain(call(**{parameter: item})[field])

    return read


def _plain(tags: Any) -> dict[str, str]:
    """Tags by key, from any of AWS's forms."""
    if isinstance(tags, dict):
        return tags
    return {tag.get("Key") or tag["TagKey"]: tag.get("Value") or tag["TagValue"] for tag in tags}


def readers(aws: Client) -> dict[str, Reader]:
    """Readers of the tags by kind of resource; EC2's kinds share one."""
    iam = aws("iam")
    ec2 = aws("ec2")

    def of_ec2(item: str) -> dict[str, str]:
        return _plain(ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [item]}])["Tags"])

    def of_group(item: str) -> dict[str, str]:
        groups = aws("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[item])["AutoScalingGroups"]
        return _plain(groups[0]["Tags"])

    def of_profile(item: str) -> dict[str, str]:  # moto has no ListInstanceProfileTags
        return _plain(iam.get_instance_profile(InstanceProfileName=item)["InstanceProfile"]["Tags"])

    def by_name(reader: Reader) -> Reader:
        return lambda arn: reader(arn.rpartition("/")[2])

    of_fsx = _tags_by_call(aws("fsx").list_tags_for_resource, "ResourceARN", "Tags")
    of_budget = _tags_by_call(aws("budgets").list_tags_for_resource, "ResourceARN", "ResourceTags")
    of_log_group = _tags_by_call(aws("logs").list_tags_for_resource, "resourceArn", "tags")
    own = {
        "Auto Scaling group": of_group,
        "alarm": _tags_by_call(aws("cloudwatch").list_tags_for_resource, "ResourceARN", "Tags"),
        "bucket": _tags_by_call(aws("s3").get_bucket_tagging, "Bucket", "TagSet"),
        "budget": lambda item: of_budget(f"arn:aws:budgets::{ACCOUNT}:budget/{item}"),
        "data repository association": of_fsx,
        "event rule": _tags_by_call(aws("events").list_tags_for_resource, "ResourceARN", "Tags"),
        "file system": of_fsx,
        "function": _tags_by_call(aws("lambda").list_tags, "Resource", "Tags"),
        # moto has no ListInstanceProfileTags.
        "instance profile": by_name(of_profile),
        "key": _tags_by_call(aws("kms").list_resource_tags, "KeyId", "Tags"),
        "log group": lambda item: of_log_group(item.removesuffix(":*")),
        "queue": _tags_by_call(aws("sqs").list_queue_tags, "QueueUrl", "Tags"),
        "role": by_name(_tags_by_call(iam.list_role_tags, "RoleName", "Tags")),
        "topic": _tags_by_call(aws("sns").list_tags_for_resource, "ResourceArn", "Tags"),
    }
    of_these = (
        "NAT gateway",
        "VPC endpoint",
        "address",
        "capacity reservation",
        "internet gateway",
        "launch template",
        "placement group",
        "route table",
        "security group",
        "subnet",
        "vpc",
    )
    return {**own, **dict.fromkeys(of_these, of_ec2)}


def check_tags(deployed: Deployment, empty: Inventory) -> None:
    """Everything new in the account carries the stack's and the user's tags, by which Cost Explorer shows its cost."""
    made, ec2 = left_behind(empty, inventory(deployed.aws)), deployed.aws("ec2")
    main = ec2.describe_route_tables(Filters=[{"Name": "association.main", "Values": ["true"]}])["RouteTables"]
    groups = ec2.describe_security_groups()["SecurityGroups"]
    by_aws = {item["RouteTableId"] for item in main}
    by_aws |= {item["GroupId"] for item in groups if item["GroupName"].startswith("default")}
    known = readers(deployed.aws)
    for kind, items in made.items():
        if kind in (*UNTAGGABLE, *MADE_BY_AWS):
            continue
        for item in items:
            if item not in by_aws:
                tags = known[kind](item)
                assert tags.get("gpufleet:stack") == deployed.stack.name, f"{kind} {item} has tags {tags}"
                assert tags.get("team") == "research", f"{kind} {item} has tags {tags}"
