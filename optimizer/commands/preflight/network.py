"""Check that nodes in an existing VPC reach AWS, and that a file system reads a bucket of its own region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bootstrap.contract.words import counted
from infra.naming import read_s3_prefix
from optimizer.aws import clients
from optimizer.aws.paging import filters, pages
from optimizer.commands.preflight.model import Context, Finding, Unknown, ask, failure, passed

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client


def check_vpc(context: Context) -> Iterator[Finding]:
    """Check that the given VPC resolves names: https://docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts.html."""
    vpc_id = context.settings.vpc_id
    if not vpc_id:
        return
    answer = context.ec2.describe_vpc_attribute(VpcId=vpc_id, Attribute="enableDnsSupport")
    resolves = answer["EnableDnsSupport"]["Value"]
    yield Finding(
        f"{vpc_id} {'resolves' if resolves else 'does not resolve'} names",
        level="ok" if resolves else "error",
        value=vpc_id,
        why="a node that finds no service by its name is replaced, at full price",
        next_step=f"aws ec2 modify-vpc-attribute --region {context.region} --vpc-id {vpc_id} --enable-dns-support",
    )


def check_addresses(context: Context) -> Iterator[Finding]:
    """Check that the given subnets have an address for each node."""
    subnet_ids, nodes, subnets = context.settings.subnet_ids, context.plan.node_count, context.subnets
    if isinstance(subnets, Unknown):
        yield subnets.finding()
        return
    if not subnet_ids:
        return
    free = sum(subnet["AvailableIpAddressCount"] for subnet in subnets)
    yield Finding(
        f"{counted(free, 'free address', 'free addresses')} in {', '.join(subnet_ids)} for {counted(nodes, 'node')}",
        level="ok" if free >= nodes else "error",
        value=free,
        limit=nodes,
        why="the nodes that get one are paid at each try, wait for the others, and are given back",
        next_step="free addresses, or give a larger subnet in gpufleet:subnetIds",
    )


def check_reach(context: Context) -> Iterator[Finding]:
    """Check that nodes in the given subnets reach the services they call: by a way out, or by an endpoint for each."""
    settings, region = context.settings, context.region
    if not settings.vpc_id:
        return
    tables = _route_tables(context.ec2, settings.vpc_id, settings.subnet_ids)
    closed = {subnet_id: table for subnet_id, table in tables.items() if not any(map(_leads_out, table["Routes"]))}
    if not closed:
        yield passed("the subnets have a way out (NAT or the like)")
        return
    services = _endpoint_services(context, {table["RouteTableId"] for table in closed.values()} - {""})
    missing = [service for service in ("s3", *settings.reached) if service not in services]
    if not missing:
        yield passed(f"{settings.vpc_id} has an endpoint for each service used")
        return
    yield failure(
        f"there is no way out of {', '.join(closed)}, and no endpoint for {', '.join(missing)}",
        value=", ".join(missing),
        why="a node fetches its set-up from S3 and completes its launch hook, or is replaced, at full price",
        next_step=f"aws ec2 create-vpc-endpoint --region {region} --vpc-id {settings.vpc_id} "
        f"--service-name com.amazonaws.{region}.{missing[0]}, or a NAT gateway",
    )


def _route_tables(ec2: EC2Client, vpc_id: str, subnet_ids: tuple[str, ...]) -> dict[str, Any]:
    """Return each subnet's route table, by default the VPC's main one, as AWS describes it."""
    main: Any = {"RouteTableId": "", "Routes": []}
    own = {}
    for table in pages(ec2, "describe_route_tables", "RouteTables", Filters=filters({"vpc-id": [vpc_id]})):
        for association in table["Associations"]:
            if association.get("Main"):
                main = table
            elif "SubnetId" in association:
                own[association["SubnetId"]] = table
    return {subnet_id: own.get(subnet_id, main) for subnet_id in subnet_ids}


def _leads_out(route: Any) -> bool:
    # An internet gateway carries public addresses only, and the nodes have none.
    by_internet_gateway = str(route.get("GatewayId", "")).startswith("igw-")
    default = route.get("DestinationCidrBlock") == "0.0.0.0/0"
    return default and route.get("State") == "active" and not by_internet_gateway


def _endpoint_services(context: Context, table_ids: set[str]) -> set[str]:
    """Return services ("s3", "ecr.api") that have an endpoint which answers by the service's own name.

    A gateway endpoint is reached by route: it counts if all of ``table_ids`` have it.
    """
    available = filters({"vpc-id": [context.settings.vpc_id], "vpc-endpoint-state": ["available"]})
    return {
        endpoint["ServiceName"].removeprefix(f"com.amazonaws.{context.region}.")
        for endpoint in pages(context.ec2, "describe_vpc_endpoints", "VpcEndpoints", Filters=available)
        if (
            table_ids <= set(endpoint.get("RouteTableIds", ()))
            if endpoint["VpcEndpointType"] == "Gateway"
            else endpoint.get("PrivateDnsEnabled")
        )
    }


def check_data_bucket(context: Context) -> Iterator[Finding]:
    """Check that a bucket which a file system is linked to is in the fleet's region."""
    plan, place = context.plan, read_s3_prefix(context.settings.data)
    if plan.lustre is None or place is None:
        return  # the configuration's check refuses a file system without data
    bucket, _ = place
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
    region = ask(lambda: clients.s3(context.region).head_bucket(Bucket=bucket)["BucketRegion"])
    if isinstance(region, Unknown):
        yield region.finding(about=f"region of {bucket}", why="reading across regions is billed by the GB")
    elif region == plan.region:
        yield passed(f"{bucket} is in {region}, as the file system that shows it", value=region)
    else:
        yield failure(
            f"{bucket} is in {region}, and the file system in {plan.region}",
            value=region,
            limit=plan.region,
            why="what it reads across regions is billed by the GB, which neither plan nor meter counts",
            next_step=f"copy the data into a bucket in {plan.region}, or plan without workload.lustre_gib",
        )
