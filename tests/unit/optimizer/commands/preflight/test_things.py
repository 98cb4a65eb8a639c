"""Image, bucket and network: what must be there, or must not be in the way."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import pytest

from optimizer.commands.preflight.image import check_container_image, check_image
from optimizer.commands.preflight.network import check_data_bucket
from optimizer.contract.plan import INTERFACE_ENDPOINTS
from tests.plans import sample_plan
from tests.unit.optimizer.commands.preflight.account import (
    ACCOUNT,
    CHECK,
    DENIED_EC2,
    DIGEST,
    REPOSITORY,
    FakeAws,
    Refusal,
    aws,
    context,
    image,
    levels,
    only,
    registry_answer,
)

__all__ = ["aws"]

check_addresses, check_reach, check_vpc = CHECK["addresses"], CHECK["way to AWS"], CHECK["VPC"]

BUCKET = f"gpufleet-dev-{ACCOUNT}-us-east-1"


@pytest.mark.parametrize(
    ("uri", "answer", "level", "says"),
    [
        (f"{REPOSITORY}@{DIGEST}", {}, "ok", "9.5 GiB of compressed layers for 125 GiB .* at least 1.3 min"),
        (f"{REPOSITORY}@{DIGEST}", {"platforms": ("arm64", "amd64")}, "ok", "9.5 GiB"),
        (f"{REPOSITORY}@{DIGEST}", {"platforms": ("arm64",)}, "error", r"no image for x86_64 \(amd64\)"),
        (f"{REPOSITORY}@{DIGEST}", {"size_gib": 126.0}, "error", "root volume of 200 GiB leaves 125"),
        (f"{REPOSITORY}@sha256:{'8' * 64}", {}, "error", "repository train of account 123456789012 .* has no image"),
        (f"{REPOSITORY}s@{DIGEST}", {}, "error", "there is no repository trains of account 123456789012"),
    ],
)
def test_a_container_image_is_there_and_fits(
    aws: FakeAws, uri: str, answer: dict[str, Any], level: str, says: str
) -> None:
    aws.answers["BatchGetImage"] = registry_answer(**answer)
    row = only(check_container_image(context(image=uri)))
    assert row.level == level and re.search(says, row.text), row.text
    assert not list(check_container_image(context()))


UBUNTU = image(ImageId="ami-u", Name="ubuntu/images/hvm-ssd-gp3/ubuntu-noble", OwnerId="099720109477")
AMAZON_LINUX = image(ImageId="ami-l", Name="Deep Learning Base AMI (Amazon Linux 2023)", ImageOwnerAlias="amazon")
OWN = {"ImageId": "ami-0123456789abcdef0", "Name": "ours", "OwnerId": ACCOUNT}


@pytest.mark.parametrize(
    ("chain", "level", "says"),
    [
        ([UBUNTU], "error", "is no Deep Learning AMI"),
        (
            [image(**OWN, SourceImageId="ami-l"), AMAZON_LINUX],
            "error",
            "is no Deep Learning AMI for Ubuntu 22.04 or 24",
        ),
        ([image(**OWN)], "ok", "'ours', an image of your own"),
        ([image(**OWN, SourceImageId="ami-1"), image(**OWN, SourceImageId="ami-u"), UBUNTU], "error", "'ours' of 'ubu"),
        ([image(**OWN, SourceImageId="ami-d"), image()], "ok", "'ours' of 'Deep Learning "),
        ([image(**OWN, SourceImageId="ami-private")], "ok", "'ours', an image of your own"),
    ],
)
def test_an_image_that_no_step_could_boot_is_said_before_up(
    aws: FakeAws, chain: list[dict[str, Any]], level: str, says: str
) -> None:
    left = iter(chain)
    aws.answers["DescribeImages"] = lambda asked: {"Images": list(islice(left, 1))}
    row = only(check_image(context(ami_id="ami-0123456789abcdef0")))
    assert row.level == level and says in row.text
    aws.answers["DescribeImages"] = Refusal("InvalidAMIID.NotFound")
    assert not list(check_image(context(ami_id="ami-1"))) and not list(check_image(context())), "pulumi up judges it"


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        ({"BucketRegion": "us-east-1"}, "ok"),
        ({"BucketRegion": "eu-west-1"}, "error"),
        (Refusal("403", 403), "unknown"),
    ],
)
def test_a_file_system_reads_from_its_own_region(aws: FakeAws, answer: Any, level: str) -> None:
    aws.answers["HeadBucket"] = answer
    plan = sample_plan(lustre={"storage_gib": 1200, "data_gib": 900.0, "usd": 5.0})
    row = only(check_data_bucket(context(plan, data="s3://corpus/tokens")))
    assert row.level == level and "corpus" in row.text
    assert not list(check_data_bucket(context(data="s3://corpus/tokens"))), "copies are planned by their region"


def subnet(**changes: Any) -> dict[str, Any]:
    return {"SubnetId": "subnet-1", "AvailabilityZoneId": "use1-az2", **changes}


@pytest.fixture
def vpc(aws: FakeAws) -> FakeAws:
    """An existing VPC with everything a fleet needs."""
    aws.answers["DescribeSubnets"] = {"Subnets": [subnet()]}
    routes(aws, gateway="nat-1")
    return aws


def routes(aws: FakeAws, *, gateway: str, main: bool = True, state: str = "active") -> None:
    key = "GatewayId" if gateway.startswith("igw") else "NatGatewayId"
    out = {"DestinationCidrBlock": "0.0.0.0/0", key: gateway, "State": state}
    association = {"Main": True} if main else {"SubnetId": "subnet-1"}
    local = {"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local", "State": "active"}
    aws.answers["DescribeRouteTables"] = [
        {"RouteTables": [{"RouteTableId": "rtb-2", "Associations": [{"SubnetId": "subnet-2"}], "Routes": [local]}]},
        {"RouteTables": [{"RouteTableId": "rtb-1", "Associations": [association], "Routes": [local, out]}]},
    ]


def endpoints(aws: FakeAws, *services: str, private_names: bool = True, table: str = "rtb-1") -> None:
    aws.answers["DescribeVpcEndpoints"] = {
        "VpcEndpoints": [
            {
                "ServiceName": f"com.amazonaws.us-east-1.{service}",
                "VpcEndpointType": "Gateway" if service == "s3" else "Interface",
                "PrivateDnsEnabled": private_names,
                "RouteTableIds": [table] if service == "s3" else [],
            }
            for service in services
        ]
    }


def existing(*subnet_ids: str, **changes: Any) -> Any:
    return context(vpc_id="vpc-1", subnet_ids=subnet_ids or ("subnet-1",), **{"subnets": [subnet()]} | changes)


@pytest.mark.parametrize("main", [True, False])
def test_a_vpc_with_nat_will_do(vpc: FakeAws, main: bool) -> None:
    routes(vpc, gateway="nat-1", main=main)
    assert levels(check_reach(existing())) == [("way to AWS", "ok")]


@pytest.mark.parametrize(("gateway", "state"), [("igw-1", "active"), ("nat-1", "blackhole")])
def test_a_vpc_without_a_way_out_needs_every_endpoint(vpc: FakeAws, gateway: str, state: str) -> None:
    routes(vpc, gateway=gateway, state=state)
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS[1:])
    row = only(check_reach(existing()))
    assert (row.level, row.value) == ("error", INTERFACE_ENDPOINTS[0])
    assert row.text.startswith("there is no way out of subnet-1, and no endpoint for")
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS)
    assert only(check_reach(existing())).level == "ok"
    cluster = existing(image=f"{REPOSITORY}@{DIGEST}")
    assert only(check_reach(cluster)).value == "ecr.api, ecr.dkr"
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, "ecr.api", "ecr.dkr")
    assert only(check_reach(cluster)).level == "ok"


def test_an_endpoint_without_private_names_or_route_is_none(vpc: FakeAws) -> None:
    routes(vpc, gateway="igw-1")
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, private_names=False)
    assert only(check_reach(existing())).value == ", ".join(INTERFACE_ENDPOINTS)
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, table="rtb-9")
    assert only(check_reach(existing())).value == "s3"


def test_one_subnet_of_two_without_a_way_out_is_an_error(vpc: FakeAws) -> None:
    endpoints(vpc)
    row = only(check_reach(existing("subnet-1", "subnet-2")))
    assert row.level == "error" and row.text.startswith("there is no way out of subnet-2, ")


def test_half_known_ways_are_unknown(vpc: FakeAws) -> None:
    routes(vpc, gateway="igw-1")
    vpc.answers["DescribeVpcEndpoints"] = DENIED_EC2
    row = only(check_reach(existing()))
    assert row.level == "unknown" and "ec2:DescribeVpcEndpoints is missing" in row.text
    vpc.answers["DescribeRouteTables"] = DENIED_EC2
    row = only(check_reach(existing()))
    assert row.level == "unknown" and "ec2:DescribeRouteTables is missing" in row.text


@pytest.mark.parametrize(("support", "level"), [(True, "ok"), (False, "error")])
def test_a_vpc_must_resolve_names(vpc: FakeAws, support: bool, level: str) -> None:
    vpc.answers["DescribeVpcAttribute"] = {"EnableDnsSupport": {"Value": support}}
    row = only(check_vpc(existing()))
    assert row.level == level and "--vpc-id vpc-1 --enable-dns-support" in row.next_step
    assert not list(check_vpc(context()))


@pytest.mark.parametrize(("free", "level"), [(2, "ok"), (1, "error")])
def test_a_gang_needs_an_address_for_each_node(vpc: FakeAws, free: int, level: str) -> None:
    row = only(check_addresses(existing(subnets=[subnet(AvailableIpAddressCount=free)])))
    assert (row.level, row.value, row.limit) == (level, free, 2)
    assert not list(check_addresses(context()))


def test_zones_come_in_the_order_of_the_subnets(aws: FakeAws) -> None:
    subnets = [subnet(SubnetId="subnet-2", AvailabilityZoneId="use1-az6"), subnet()]
    assert existing("subnet-1", "subnet-2", subnets=subnets).zone_ids == ("use1-az2", "use1-az6")
