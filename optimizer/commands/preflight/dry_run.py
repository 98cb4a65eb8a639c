"""Ask EC2 for the plan's nodes and reservation as dry runs, which judge permissions and create nothing.

With the permission EC2 answers DryRunOperation, without it UnauthorizedOperation; it looks at no capacity:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError

from infra.settings import ConfigError
from optimizer.aws import errors
from optimizer.aws.paging import filters
from optimizer.commands.preflight.image import describe_images, wanted_image
from optimizer.commands.preflight.model import Check, Context, Finding, Unknown, ask, passed, unknown

_WHY = (
    "pulumi up needs it; the deployer's policy permits nodes by a launch template alone, so a dry run is refused where "
    "pulumi up is not"
)
_NEXT = "aws sts decode-authorization-message tells the policies of an encoded message"


def check_node(context: Context) -> Iterator[Finding]:
    """Ask for the plan's nodes as their launch template describes them."""
    plan, subnet_ids = context.plan, context.settings.subnet_ids
    images = []
    with suppress(ConfigError):  # pulumi up says it
        images = describe_images(context, wanted_image(context))
    if not images:
        yield unknown("there is no image to ask with", next_step="pulumi up says what is wrong with it")
        return
    volume: Any = {"VolumeSize": plan.volumes.root_gib, "VolumeType": "gp3", "Encrypted": True}
    request: dict[str, Any] = {
        "ImageId": images[0]["ImageId"],
        "InstanceType": plan.instance_type,
        "MinCount": plan.node_count,
        "MaxCount": plan.node_count,
        # A policy may ask for IMDSv2, and EC2 reads that of the request alone:
        # https://github.com/aws/karpenter-provider-aws/issues/9018
        "MetadataOptions": {"HttpTokens": "required"},
        "BlockDeviceMappings": [{"DeviceName": images[0]["RootDeviceName"], "Ebs": volume}],
        "TagSpecifications": [{"ResourceType": "instance", "Tags": _tags(context)}],
    }
    if plan.purchase.option in ("spot", "capacity-block"):
        request["InstanceMarketOptions"] = {"MarketType": plan.purchase.option}
    if id_ := plan.purchase.capacity_reservation_id:
        request["CapacityReservationSpecification"] = {"CapacityReservationTarget": {"CapacityReservationId": id_}}
    if subnet_ids:
        request["SubnetId"] = subnet_ids[0]
    yield _ask(f"{plan.node_count} x {plan.instance_type}", context.ec2.run_instances, request)


def check_reservation(context: Context) -> Iterator[Finding]:
    """Ask for the reservation that the stack makes, in its placement group once that is there."""
    plan, zones = context.plan, context.zone_ids
    if plan.purchase.option != "reserved" or plan.purchase.capacity_reservation_id or not zones:
        return
    request: dict[str, Any] = {
        "InstanceType": plan.instance_type,
        "InstancePlatform": "Linux/UNIX",
        "InstanceCount": plan.node_count,
        "AvailabilityZoneId": zones[0],
        "EbsOptimized": True,
        "InstanceMatchCriteria": "targeted",
        "EndDateType": "unlimited",
        "TagSpecifications": [{"ResourceType": "capacity-reservation", "Tags": _tags(context)}],
    }
    own: Any = filters({"tag:gpufleet:stack": [context.stack]})
    groups = ask(lambda: context.ec2.describe_placement_groups(Filters=own)["PlacementGroups"])
    if not isinstance(groups, Unknown) and groups:
        request["PlacementGroupArn"] = groups[0]["GroupArn"]
    what = f"a reservation of {plan.node_count} x {plan.instance_type}"
    yield _ask(what, context.ec2.create_capacity_reservation, request)


DRY_RUNS = (
    Check("dry run of RunInstances", check_node),
    Check("dry run of CreateCapacityReservation", check_reservation),
)


def _tags(context: Context) -> list[dict[str, str]]:
    return [{"Key": "gpufleet:stack", "Value": context.stack}]


def _ask(what: str, operation: Callable[..., object], request: dict[str, Any]) -> Finding:
    try:
        operation(DryRun=True, **request)
    except ClientError as error:
        if errors.code(error) == "DryRunOperation":
            return passed(f"EC2 permits {what} to these credentials")
        if not errors.is_not_permitted(error):
            raise
        # A Deny is of the account or its organisation. Without an Allow another caller may be permitted:
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
        is_denied = "explicit deny" in str(error)
        return Finding(
            f"EC2 refuses {what} to these credentials: {errors.reason(error)}",
            level="error" if is_denied else "warning",
            why="a policy denies it, and no Allow changes that" if is_denied else _WHY,
            next_step="ask who owns the policy, or plan another type or region" if is_denied else _NEXT,
        )
    return unknown(f"EC2 answered no error for {what}, as no dry run does", next_step="gpufleet status")
