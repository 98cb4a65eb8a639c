"""Whether the network is there for the nodes: an existing VPC that reaches AWS, or room for one of the stack's own."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optimizer.aws import errors
from optimizer.aws.preflight.model import Context, Row, Unknown, ask

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

# Of an account in a region: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/limitations-placement-groups.html
PLACEMENT_GROUPS = 500


def subnet_zones(ec2: EC2Client, subnet_ids: tuple[str, ...]) -> tuple[str, ...]:
    """Ids of the zones of ``subnet_ids``, in their order."""
    if not subnet_ids:
        return ()
    answer = ec2.describe_subnets(SubnetIds=list(subnet_ids))
    zones = {subnet["SubnetId"]: subnet["AvailabilityZoneId"] for subnet in answer["Subnets"]}
    return tuple(zones[subnet_id] for subnet_id in subnet_ids)


def check_network(context: Context) -> Iterator[Row]:
    """The given VPC and subnets, or whether the range of a new VPC is taken by another one."""
    ec2 = context.ec2
    if context.target.vpc_id:
        yield from _existing(context, ec2)
    else:
        yield from _overlaps(context, ec2)


def check_placement_groups(context: Context) -> Iterator[Row]:
    """A gang gets a cluster placement group of its own, except in a reservation that may have one."""
    if not context.target.gang or context.plan.purchase.capacity_reservation_id:
        return
    groups = context.ec2.describe_placement_groups()["PlacementGroups"]
    full = len(groups) >= PLACEMENT_GROUPS
    yield Row(
        check="placement groups",
        level="error" if full else "ok",
        found=f"{len(groups)} of {PLACEMENT_GROUPS} are in use, and the fleet needs one",
        value=len(groups),
        limit=PLACEMENT_GROUPS,
        why="the fleet's nodes start in a cluster placement group" if full else "",
        next_step=f"aws ec2 delete-placement-group --region {context.region} --group-name UNUSED" if full else "",
    )


def _overlaps(context: Context, ec2: EC2Client) -> Iterator[Row]:
    own, stack = ipaddress.ip_network(context.target.vpc_cidr), context.target.stack
    pages = ec2.get_paginator("describe_vpcs").paginate()
    taken = []
    for page in pages:
        for vpc in page["Vpcs"]:
            if stack and {"Key": stack.tag, "Value": stack.name} in vpc.get("Tags", []):
                continue
            for block in vpc.get("CidrBlockAssociationSet", ()):
                if own.overlaps(ipaddress.ip_network(block["CidrBlock"])):
                    taken.append(f"{vpc['VpcId']} ({block['CidrBlock']})")
    if taken:
        yield Row(
            check="VPC range",
            level="warning",
            found=f"{own} overlaps {', '.join(taken)}",
            value=str(own),
            why="AWS allows it, and the two can never be peered or share a transit gateway",
            next_step="pulumi config set gpufleet:vpcCidr RANGE",
        )
    else:
        yield Row(check="VPC range", level="ok", found=f"{own} overlaps no other VPC of the region", value=str(own))


def _existing(context: Context, ec2: EC2Client) -> Iterator[Row]:
    target, region = context.target, context.region
    try:
        ec2.describe_vpcs(VpcIds=[target.vpc_id])
        subnets: list[Any] = list(ec2.describe_subnets(SubnetIds=list(target.subnet_ids))["Subnets"])
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        yield Row(
            check="network",
            level="error",
            found=errors.reason(error),
            why="the nodes start in the given subnets",
            next_step=f"aws ec2 describe-subnets --region {region}",
        )
        return
    yield from _dns(context, ec2)
    for subnet in subnets:
        yield from _subnet(context, subnet, alone=len(subnets) == 1)
    yield _reach(context, ask(lambda: _routed(ec2, target.vpc_id, subnets)), ask(lambda: _endpoints(ec2, context)))


def _dns(context: Context, ec2: EC2Client) -> Iterator[Row]:
    vpc_id = context.target.vpc_id
    support = ec2.describe_vpc_attribute(VpcId=vpc_id, Attribute="enableDnsSupport")["EnableDnsSupport"]["Value"]
    names = ec2.describe_vpc_attribute(VpcId=vpc_id, Attribute="enableDnsHostnames")["EnableDnsHostnames"]["Value"]
    off = [word for word, on in (("DNS support", support), ("DNS host names", names)) if not on]
    yield Row(
        check="VPC DNS",
        level="error" if not support else "warning" if off else "ok",
        found=f"{vpc_id} has {' and '.join(off)} off" if off else f"{vpc_id} resolves names",
        why="private names of endpoints need both (https://docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts"
        ".html)"
        if off
        else "",
        next_step=f"aws ec2 modify-vpc-attribute --region {context.region} --vpc-id {vpc_id} --enable-dns-support"
        " (then --enable-dns-hostnames)"
        if off
        else "",
    )


def _subnet(context: Context, subnet: Any, *, alone: bool) -> Iterator[Row]:
    target, plan, id_ = context.target, context.plan, subnet["SubnetId"]
    check = f"subnet {id_}"
    if subnet["VpcId"] != target.vpc_id:
        yield Row(
            check=check,
            level="error",
            found=f"{id_} is in {subnet['VpcId']}, and gpufleet:vpcId is {target.vpc_id}",
            value=subnet["VpcId"],
            limit=target.vpc_id,
            why="the security group is of the one and the nodes would be in the other",
            next_step=f"pulumi config set gpufleet:vpcId {subnet['VpcId']}",
        )
    if subnet["State"] != "available":
        yield Row(check=check, level="error", found=f"{id_} is {subnet['State']}", value=subnet["State"])
    # Only a node's first card has an address; a replacement may start while its predecessor stops.
    free, needed = subnet["AvailableIpAddressCount"], plan.node_count
    short = free < needed
    yield Row(
        check=check,
        level=("error" if alone else "warning") if short else "warning" if free < 2 * needed else "ok",
        found=f"{id_} in {subnet['AvailabilityZoneId']} has {free} free addresses for {needed} nodes",
        value=free,
        limit=needed if short else 2 * needed,
        why="a node needs an address, and a second while it is being replaced" if free < 2 * needed else "",
        next_step="free addresses, or give a larger subnet in gpufleet:subnetIds" if free < 2 * needed else "",
    )
    if subnet.get("MapPublicIpOnLaunch"):
        yield Row(
            check=check,
            level="warning",
            found=f"{id_} gives public addresses",
            why="a lone node gets none all the same; other machines in the subnet may face the internet",
            next_step="give a private subnet in gpufleet:subnetIds",
        )


def _routed(ec2: EC2Client, vpc_id: str, subnets: list[Any]) -> list[str]:
    """Ids of ``subnets`` without a way out: no default route in their table, or in the VPC's main one."""
    pages = ec2.get_paginator("describe_route_tables").paginate(Filters=[{"Name": "vpc-id", "Values": [vpc_id]}])
    main, by_subnet = False, {}
    for page in pages:
        for table in page["RouteTables"]:
            out = any(
                route.get("DestinationCidrBlock") == "0.0.0.0/0"
                and route.get("State") == "active"
                # An internet gateway carries only what has a public address, and the nodes have none.
                and not str(route.get("GatewayId", "")).startswith("igw-")
                for route in table["Routes"]
            )
            for association in table["Associations"]:
                if association.get("Main"):
                    main = out
                elif "SubnetId" in association:
                    by_subnet[association["SubnetId"]] = out
    return [subnet["SubnetId"] for subnet in subnets if not by_subnet.get(subnet["SubnetId"], main)]


def _endpoints(ec2: EC2Client, context: Context) -> set[str]:
    """Services that the VPC has available endpoints for: "s3", "ecr.api"."""
    pages = ec2.get_paginator("describe_vpc_endpoints").paginate(
        Filters=[
            {"Name": "vpc-id", "Values": [context.target.vpc_id]},
            {"Name": "vpc-endpoint-state", "Values": ["available"]},
        ]
    )
    own = f"com.amazonaws.{context.region}."
    return {endpoint["ServiceName"].removeprefix(own) for page in pages for endpoint in page["VpcEndpoints"]}


def _reach(context: Context, closed: list[str] | Unknown, endpoints: set[str] | Unknown) -> Row:
    check = "way to AWS"
    why = "a node fetches its set-up from S3 and completes its launch hook, or is replaced, at full price"
    if isinstance(closed, list) and not closed:
        return Row(check=check, level="ok", found="the subnets have a way out (NAT or the like)")
    if isinstance(endpoints, Unknown):
        return endpoints.row(check, why=why)
    missing = [service for service in ("s3", *context.target.endpoints) if service not in endpoints]
    if not missing:
        return Row(check=check, level="ok", found=f"{context.target.vpc_id} has an endpoint for each service used")
    about = f"{context.target.vpc_id} has no endpoint for {', '.join(missing)}"
    if isinstance(closed, Unknown):
        return closed.row(check, about=about, why=why)
    return Row(
        check=check,
        level="error",
        found=f"{about}, and {', '.join(closed)} no way out",
        value=", ".join(missing),
        why=why,
        next_step=f"aws ec2 create-vpc-endpoint --region {context.region} --vpc-id {context.target.vpc_id} "
        f"--service-name com.amazonaws.{context.region}.{missing[0]}, or a NAT gateway",
    )
