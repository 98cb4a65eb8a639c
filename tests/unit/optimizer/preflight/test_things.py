"""Image, key, bucket and network: what must be there, or must not be in the way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from optimizer.contract.plan import INTERFACE_ENDPOINTS
from optimizer.preflight.account import check_boundary, check_session_logs, check_volume_encryption
from optimizer.preflight.image import check_container_image, check_image
from optimizer.preflight.network import (
    PLACEMENT_GROUPS,
    check_placement_groups,
    check_subnets,
    subnet_zones,
)
from optimizer.preflight.storage import check_bucket, check_data_bucket, check_file_system
from tests.plans import sample_plan
from tests.unit.optimizer.preflight.account import (
    ACCOUNT,
    ADDRESS,
    CHECK,
    DENIED,
    DENIED_EC2,
    DIGEST,
    FILE_SYSTEM,
    PARAMETER,
    REPOSITORY,
    ROLE,
    FakeAws,
    Refusal,
    aws,
    context,
    file_system_answers,
    image,
    key_policy,
    levels,
    only,
    registry_answer,
)

__all__ = ["aws"]

check_key, check_range = CHECK["KMS key"], CHECK["VPC range"]
check_reach, check_vpc = CHECK["way to AWS"], CHECK["VPC"]

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
    row = only(check_container_image(context(container_image=uri)))
    assert row.level == level and re.search(says, row.text), row.text
    assert not list(check_container_image(context()))


def test_without_a_pinned_image_the_parameter_names_it(aws: FakeAws) -> None:
    assert only(check_image(context())).level == "ok"
    assert aws.asked("GetParameter") == [{"Name": PARAMETER}]
    aws.answers["GetParameter"] = Refusal("ParameterNotFound")
    row = only(check_image(context()))
    assert (row.level, row.text) == ("error", f"no parameter {PARAMETER} in us-east-1")
    aws.answers["GetParameter"] = DENIED
    row = only(check_image(context()))
    assert row.level == "unknown" and "ssm:GetParameter" in row.text


UBUNTU = image(ImageId="ami-u", Name="ubuntu/images/hvm-ssd-gp3/ubuntu-noble", OwnerId="099720109477")
OWN = {"ImageId": "ami-0123456789abcdef0", "Name": "ours", "OwnerId": ACCOUNT}


@pytest.mark.parametrize(
    ("chain", "level", "says"),
    [
        ([image(**OWN, SourceImageId="ami-d"), image(ImageId="ami-d")], "ok", "'ours'"),
        ([image(**OWN, SourceImageId="ami-1"), image(**OWN, SourceImageId="ami-d"), image()], "ok", "'ours'"),
        ([UBUNTU], "error", "is no Deep Learning AMI"),
        ([image(**OWN, SourceImageId="ami-u"), UBUNTU], "error", "'ours' comes from 'ubuntu/"),
        ([image(**OWN)], "warning", "AWS does not show that 'ours' is derived from a Deep Learning AMI"),
        ([image(**OWN, SourceImageId="ami-x", SourceImageRegion="eu-west-1")], "warning", "does not show"),
    ],
)
def test_an_image_that_no_step_could_boot_is_said_before_up(
    aws: FakeAws, chain: list[dict[str, Any]], level: str, says: str
) -> None:
    left = iter(chain)
    aws.answers["DescribeImages"] = lambda asked: {"Images": [next(left)]}
    row = only(check_image(context(ami_id="ami-0123456789abcdef0", ami_name="", own_image=True)))
    assert row.level == level and says in row.text


def volume(device: str = "/dev/sda1", gib: int = 75, **changes: Any) -> dict[str, Any]:
    return {"DeviceName": device, "Ebs": {"VolumeSize": gib, **changes}}


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"Architecture": "arm64"}, "error", "is for arm64, and p4d.24xlarge is x86_64"),
        ({"State": "disabled"}, "error", "is disabled"),
        ({"EnaSupport": False}, "error", "not registered with ENA support"),
        ({"DeprecationTime": "2026-11-01T00:00:00.000Z"}, "warning", "is deprecated since 2026-11-01"),
        (
            {"BlockDeviceMappings": [volume(gib=300), volume("/dev/sdb", 900)]},
            "error",
            "needs a root volume of 300 GiB, and the plan has 200",
        ),
        ({"BlockDeviceMappings": [volume(Encrypted=True)]}, "warning", "are encrypted"),
    ],
)
def test_an_image_that_does_not_fit(aws: FakeAws, changes: dict[str, Any], level: str, says: str) -> None:
    aws.answers["DescribeImages"] = {"Images": [image(**changes)]}
    row = only(check_image(context(ami_id="ami-0123456789abcdef0", ami_name="", own_image=True)))
    assert row.level == level and says in row.text and row.next_step


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ({"Images": []}, 0),
        ({"Images": [image(), image(ImageId="ami-2")]}, 2),
        (Refusal("InvalidAMIID.NotFound"), 0),
        (Refusal("InvalidAMIID.Unavailable"), 0),
        (Refusal("InvalidAMIID.Malformed"), 0),
    ],
)
def test_none_or_two_images_are_an_error(aws: FakeAws, answer: Any, count: int) -> None:
    aws.answers["DescribeImages"] = answer
    by_id = isinstance(answer, Refusal)
    row = only(check_image(context(ami_id="ami-1", ami_name="") if by_id else context()))
    assert (row.level, row.value, row.limit) == ("error", count, 1)


def test_a_plan_without_an_image_is_an_error_without_a_call(aws: FakeAws) -> None:
    row = only(check_image(context(ami_problem="p3.2xlarge has V100 GPUs")))
    assert (row.level, row.text, aws.calls) == ("error", "p3.2xlarge has V100 GPUs", [])


def test_a_key_that_is_yet_to_be_made_is_unknown(aws: FakeAws) -> None:
    aws.answers["DescribeKey"] = Refusal("NotFoundException")
    row = only(check_key(context()))
    assert row.level == "unknown" and "CreateKey has no dry run" in row.why


@pytest.mark.parametrize(
    ("state", "next_step"),
    [
        ("Disabled", "aws kms enable-key --region us-east-1 --key-id 1234"),
        (
            "PendingDeletion",
            "aws kms cancel-key-deletion --region us-east-1 --key-id 1234 && "
            "aws kms enable-key --region us-east-1 --key-id 1234",
        ),
    ],
)
def test_a_key_that_is_off_is_an_error_and_the_rest_is_looked_at(aws: FakeAws, state: str, next_step: str) -> None:
    aws.answers["DescribeKey"] = {"KeyMetadata": {"KeyId": "1234", "KeyState": state}}
    rows = list(check_key(context()))
    assert levels(rows) == [("KMS key", "error"), ("KMS key rotation", "ok"), ("KMS grants", "ok")]
    assert rows[0].next_step == next_step


def test_rotation_and_policy_are_each_judged_or_unknown(aws: FakeAws) -> None:
    aws.answers["GetKeyRotationStatus"] = {"KeyRotationEnabled": False}
    aws.answers["GetKeyPolicy"] = Refusal("AccessDeniedException")
    rows = list(check_key(context()))
    assert levels(rows) == [("KMS key", "ok"), ("KMS key rotation", "warning"), ("KMS grants", "unknown")]
    assert "kms:GetKeyPolicy is missing" in rows[2].text
    aws.answers["GetKeyRotationStatus"] = Refusal("AccessDeniedException")
    assert levels(check_key(context()))[1] == ("KMS key rotation", "unknown")


ALL_GRANTS = "kms:CreateGrant, kms:Decrypt, kms:GenerateDataKeyWithoutPlaintext"


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (key_policy(role="AROAEXAMPLE"), ALL_GRANTS),
        (key_policy(actions=("kms:Decrypt",)), "kms:GenerateDataKeyWithoutPlaintext"),
        (json.dumps({"Statement": []}), ALL_GRANTS),
        (key_policy().replace("Allow", "Deny"), ALL_GRANTS),
    ],
)
def test_a_policy_without_the_service_role_is_an_error(aws: FakeAws, policy: str, missing: str) -> None:
    aws.answers["GetKeyPolicy"] = {"Policy": policy}
    row = list(check_key(context()))[2]
    assert (row.level, row.value) == ("error", missing) and ROLE in row.text


@pytest.mark.parametrize(("by_default", "value"), [(False, "off"), (True, "alias/aws/ebs")])
def test_the_accounts_own_encryption_is_no_hindrance(aws: FakeAws, by_default: bool, value: str) -> None:
    aws.answers["GetEbsEncryptionByDefault"] = {"EbsEncryptionByDefault": by_default}
    aws.answers["GetEbsDefaultKmsKeyId"] = {"KmsKeyId": "alias/aws/ebs"}
    row = only(check_volume_encryption(context()))
    assert (row.level, row.value) == ("ok", value)


@pytest.mark.parametrize(
    ("listed", "head", "level", "says"),
    [
        ([BUCKET], {}, "ok", "is this account's"),
        ([], Refusal("404", 404), "ok", "is free"),
        ([f"{BUCKET}-old"], Refusal("404", 404), "ok", "is free"),
        ([], Refusal("403", 403), "error", "is another account's"),
        ([], Refusal("301", 301), "error", "is another account's"),
        ([], {}, "error", "is another account's"),
        (DENIED, Refusal("404", 404), "ok", "is free"),
        (DENIED, Refusal("403", 403), "unknown", "s3:ListAllMyBuckets is missing"),
        (DENIED, {}, "unknown", "s3:ListAllMyBuckets is missing"),
    ],
)
def test_whose_the_buckets_name_is(aws: FakeAws, listed: Any, head: Any, level: str, says: str) -> None:
    answer = listed if isinstance(listed, Refusal) else {"Buckets": [{"Name": name} for name in listed]}
    aws.answers |= {"ListBuckets": answer, "HeadBucket": head}
    row = only(check_bucket(context()))
    assert row.level == level and says in row.text and BUCKET in row.text


def test_all_pages_of_buckets_are_read(aws: FakeAws) -> None:
    pages: dict[int, dict[str, Any]] = {
        0: {"Buckets": [{"Name": f"{BUCKET}0"}], "ContinuationToken": "1"},
        1: {"Buckets": [{"Name": BUCKET}]},
    }
    aws.answers["ListBuckets"] = lambda params: pages[int(params.get("ContinuationToken", 0))]
    assert only(check_bucket(context())).level == "ok"
    assert aws.asked("HeadBucket") == []


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
    row = only(check_data_bucket(context(plan, data_bucket="corpus")))
    assert row.level == level and "corpus" in row.text
    assert not list(check_data_bucket(context(data_bucket="corpus"))), "copies are planned by their region"


MOUNTED = (ADDRESS, "sg-0123456789abcdef0")
IN_VPC: dict[str, Any] = {"vpc_id": "vpc-00000001", "subnet_ids": ("subnet-9",), "subnet_zones": ("use1-az2",)}


def test_an_existing_file_system_is_beside_the_nodes(aws: FakeAws) -> None:
    assert not list(check_file_system(context(**IN_VPC)))
    aws.answers |= file_system_answers()
    row = only(check_file_system(context(file_system=MOUNTED, **IN_VPC)))
    assert (row.level, row.value) == ("ok", FILE_SYSTEM)


@pytest.mark.parametrize(
    ("system", "changes", "said"),
    [
        ({"Lifecycle": "CREATING"}, {}, "is CREATING, not AVAILABLE"),
        ({"FileSystemType": "OPENZFS"}, {}, "is of type OPENZFS"),
        ({"LustreConfiguration": {"MountName": "other"}}, {}, "and AWS has"),
        ({}, {"file_system": (ADDRESS, "sg-9")}, "and AWS has"),
        (
            {},
            {"file_system": ("fs-00000000.fsx.us-east-1.amazonaws.com@tcp:/a", "sg-9")},
            "there is no file system fs-0",
        ),
        ({"VpcId": "vpc-00000002"}, {}, "is in vpc-00000002, and gpufleet:vpcId is vpc-00000001"),
        ({}, {"subnet_zones": ("use1-az2", "use1-az6")}, "is in zone use1-az2, and gpufleet:subnetIds in use1-az6"),
    ],
)
def test_an_existing_file_system_that_the_nodes_do_not_reach_is_an_error(
    aws: FakeAws, system: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    aws.answers |= file_system_answers(**system)
    row = only(check_file_system(context(**{"file_system": MOUNTED, **IN_VPC, **changes})))
    assert row.level == "error" and said in row.text and row.next_step


@pytest.mark.parametrize(
    ("taken", "level"),
    [("172.31.0.0/16", "ok"), ("10.42.128.0/20", "warning"), ("10.0.0.0/8", "warning")],
)
def test_a_range_that_another_vpc_has_is_a_warning(aws: FakeAws, taken: str, level: str) -> None:
    associations = [{"CidrBlock": "192.168.0.0/24"}, {"CidrBlock": taken}]
    aws.answers["DescribeVpcs"] = [
        {"Vpcs": []},
        {"Vpcs": [{"VpcId": "vpc-9", "CidrBlockAssociationSet": associations}]},
    ]
    row = only(check_range(context()))
    assert (row.check, row.level) == ("VPC range", level)
    assert ("vpc-9" in row.text) == (level == "warning")


def test_the_stacks_own_vpc_has_its_range_by_right(aws: FakeAws) -> None:
    own = {"Key": "gpufleet:stack", "Value": "dev"}
    vpc = {"VpcId": "vpc-9", "CidrBlockAssociationSet": [{"CidrBlock": "10.42.0.0/16"}], "Tags": [own]}
    aws.answers["DescribeVpcs"] = {"Vpcs": [vpc]}
    assert only(check_range(context())).level == "ok"
    assert only(check_range(context(stack=None))).level == "warning"


def subnet(**changes: Any) -> dict[str, Any]:
    return {
        "SubnetId": "subnet-1",
        "VpcId": "vpc-1",
        "State": "available",
        "AvailabilityZoneId": "use1-az2",
        "AvailableIpAddressCount": 100,
        "MapPublicIpOnLaunch": False,
        **changes,
    }


@pytest.fixture
def vpc(aws: FakeAws) -> FakeAws:
    """An existing VPC with everything a fleet needs."""
    aws.answers["DescribeVpcs"] = {"Vpcs": [{"VpcId": "vpc-1"}]}
    aws.answers["DescribeSubnets"] = {"Subnets": [subnet()]}
    dns(aws, support=True, names=True)
    routes(aws, gateway="nat-1")
    return aws


def dns(aws: FakeAws, *, support: bool, names: bool) -> None:
    values = {"enableDnsSupport": support, "enableDnsHostnames": names}
    aws.answers["DescribeVpcAttribute"] = lambda asked: {
        asked["Attribute"][0].upper() + asked["Attribute"][1:]: {"Value": values[asked["Attribute"]]}
    }


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
    return context(vpc_id="vpc-1", subnet_ids=subnet_ids or ("subnet-1",), subnet_zones=("use1-az2",), **changes)


@pytest.mark.parametrize("main", [True, False])
def test_a_vpc_with_nat_will_do(vpc: FakeAws, main: bool) -> None:
    routes(vpc, gateway="nat-1", main=main)
    assert levels(check_vpc(existing())) == [("VPC", "ok")]
    assert levels(check_subnets(existing())) == [("subnet subnet-1", "ok")]
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
    cluster = existing(endpoints=(*INTERFACE_ENDPOINTS, "ecr.api"))
    assert only(check_reach(cluster)).value == "ecr.api"
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, "ecr.api")
    assert only(check_reach(cluster)).level == "ok"


def test_an_endpoint_without_private_names_or_route_is_none(vpc: FakeAws) -> None:
    routes(vpc, gateway="igw-1")
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, private_names=False)
    assert only(check_reach(existing())).value == ", ".join(INTERFACE_ENDPOINTS)
    endpoints(vpc, "s3", *INTERFACE_ENDPOINTS, table="rtb-9")
    assert only(check_reach(existing())).value == "s3"


def test_one_subnet_of_two_without_a_way_out_is_an_error(vpc: FakeAws) -> None:
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


@pytest.mark.parametrize(
    ("support", "names", "level", "steps"),
    [(False, False, "error", 2), (True, False, "warning", 1), (False, True, "error", 1)],
)
def test_a_vpc_must_resolve_names(vpc: FakeAws, support: bool, names: bool, level: str, steps: int) -> None:
    dns(vpc, support=support, names=names)
    row = only(check_vpc(existing()))
    assert row.level == level and row.next_step.count("aws ec2 modify-vpc-attribute") == steps
    assert ("--enable-dns-hostnames" in row.next_step) != names


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"AvailableIpAddressCount": 1}, "error", "has 1 free addresses for 2 nodes"),
        ({"AvailableIpAddressCount": 3}, "warning", "has 3 free addresses for 2 nodes"),
        ({"VpcId": "vpc-2"}, "error", "is in vpc-2"),
        ({"State": "pending"}, "error", "is pending"),
        ({"MapPublicIpOnLaunch": True}, "warning", "gives public addresses"),
    ],
)
def test_a_subnet_that_does_not_fit(vpc: FakeAws, changes: dict[str, Any], level: str, says: str) -> None:
    vpc.answers["DescribeSubnets"] = {"Subnets": [subnet(**changes)]}
    row = only(row for row in check_subnets(existing()) if row.level != "ok")
    assert row.level == level and says in row.text


def test_one_of_several_subnets_may_be_full(vpc: FakeAws) -> None:
    full = subnet(SubnetId="subnet-2", AvailableIpAddressCount=0)
    vpc.answers["DescribeSubnets"] = {"Subnets": [subnet(), full]}
    assert levels(check_subnets(existing("subnet-1", "subnet-2"))) == [
        ("subnet subnet-1", "ok"),
        ("subnet subnet-2", "warning"),
    ]


@pytest.mark.parametrize(
    ("operation", "code", "check"),
    [
        ("DescribeVpcAttribute", "InvalidVpcID.NotFound", check_vpc),
        ("DescribeSubnets", "InvalidSubnetID.NotFound", check_subnets),
    ],
)
def test_a_network_that_is_not_there(vpc: FakeAws, operation: str, code: str, check: Any) -> None:
    vpc.answers[operation] = Refusal(code, message="The id does not exist")
    row = only(check(existing()))
    assert (row.level, row.text) == ("error", f"{code}: The id does not exist")


def test_zones_come_in_the_order_of_the_subnets(aws: FakeAws) -> None:
    aws.answers["DescribeSubnets"] = {"Subnets": [subnet(SubnetId="subnet-2", AvailabilityZoneId="use1-az6"), subnet()]}
    assert subnet_zones(context().ec2, ("subnet-1", "subnet-2")) == ("use1-az2", "use1-az6")
    assert subnet_zones(context().ec2, ()) == ()


@pytest.mark.parametrize(("count", "level"), [(0, "ok"), (PLACEMENT_GROUPS - 1, "ok"), (PLACEMENT_GROUPS, "error")])
def test_a_gang_needs_a_placement_group(aws: FakeAws, count: int, level: str) -> None:
    aws.answers["DescribePlacementGroups"] = {"PlacementGroups": [{}] * count}
    assert only(check_placement_groups(context())).level == level


def test_no_placement_group_is_made_for_a_lone_node_or_an_existing_reservation(aws: FakeAws) -> None:
    purchase = {"option": "reserved", "on_demand_base": 0, "capacity_reservation_id": "cr-0123456789abcdef0"}
    assert list(check_placement_groups(context(gang=False))) == []
    assert list(check_placement_groups(context(sample_plan(purchase=purchase)))) == []


def test_a_boundary_must_exist(aws: FakeAws) -> None:
    assert list(check_boundary(context())) == []
    arn = f"arn:aws:iam::{ACCOUNT}:policy/limits"
    aws.answers["GetPolicy"] = {"Policy": {"Arn": arn}}
    assert only(check_boundary(context(permissions_boundary=arn))).level == "ok"
    assert aws.asked("GetPolicy") == [{"PolicyArn": arn}]
    aws.answers["GetPolicy"] = Refusal("NoSuchEntity", 404)
    assert only(check_boundary(context(permissions_boundary=arn))).level == "error"


@pytest.mark.parametrize(
    ("preferences", "found"),
    [
        (Refusal("InvalidDocument"), ["logs no session of Session Manager in us-east-1"]),
        ({}, ["logs no session"]),
        ({"cloudWatchLogGroupName": "", "s3BucketName": ""}, ["logs no session"]),
        ({"cloudWatchLogGroupName": "/other"}, ["into log group /other, where the nodes may not write"]),
        ({"cloudWatchLogGroupName": "/sessions", "s3BucketName": "b"}, ["into log group /sessions and bucket b"]),
        ({"s3BucketName": "b"}, ["into bucket b"]),
        ({"cloudWatchLogGroupName": "/sessions"}, []),
        ({"cloudWatchLogGroupName": "/sessions", "kmsKeyId": "1a2b"}, ["under KMS key 1a2b"]),
    ],
)
def test_sessions_that_leave_no_log_are_a_warning(
    aws: FakeAws, preferences: dict[str, str] | Refusal, found: list[str]
) -> None:
    document = preferences if isinstance(preferences, Refusal) else {"Content": json.dumps({"inputs": preferences})}
    aws.answers["GetDocument"] = document
    rows = [row for row in check_session_logs(context()) if row.level != "ok"]
    assert all(text in row.text and row.why and row.next_step for text, row in zip(found, rows, strict=True))
    assert {row.level for row in rows} <= {"warning"}
