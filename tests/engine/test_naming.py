"""Pulumi's names from Terraform's; the whole of them is compared with pulumi_aws in test_lifecycle."""

from __future__ import annotations

import pytest

from tests.engine.plugin.naming import camel_case, logical_name, plural, property_name, snake_case, type_token
from tests.engine.plugin.naming import terraform_type as find_type

KNOWN = {
    "aws_ami",
    "aws_autoscaling_group",
    "aws_availability_zones",
    "aws_caller_identity",
    "aws_ec2_capacity_reservation",
    "aws_launch_template",
    "aws_s3_bucket",
    "aws_s3_bucket_versioning",
    "aws_s3_object",
    "aws_vpc",
    "aws_vpc_security_group_ingress_rule",
}


@pytest.mark.parametrize(
    ("terraform", "many", "pulumi"),
    [
        ("http_put_response_hop_limit", False, "httpPutResponseHopLimit"),
        ("cidr_ipv4", False, "cidrIpv4"),
        ("policy", True, "policies"),
        ("override", True, "overrides"),
        ("security_groups", True, "securityGroups"),
        ("alias", True, "alias"),
        ("address", True, "addresses"),
        ("prefix", True, "prefixes"),
        ("key", True, "keys"),
    ],
)
def test_property_names_follow_the_bridge(terraform: str, many: bool, pulumi: str) -> None:
    assert property_name(terraform, many=many) == pulumi


@pytest.mark.parametrize("name", ["launch_template", "kms_key_arn", "enable_dns_hostnames"])
def test_snake_case_undoes_camel_case(name: str) -> None:
    assert snake_case(camel_case(name)) == name


def test_a_plural_stays_as_it_is() -> None:
    assert plural(plural("subnet_id")) == "subnet_ids"


@pytest.mark.parametrize(
    ("token", "terraform"),
    [
        ("aws:autoscaling/group:Group", "aws_autoscaling_group"),
        ("aws:ec2/vpc:Vpc", "aws_vpc"),
        ("aws:ec2/launchTemplate:LaunchTemplate", "aws_launch_template"),
        ("aws:ec2/capacityReservation:CapacityReservation", "aws_ec2_capacity_reservation"),
        ("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule", "aws_vpc_security_group_ingress_rule"),
        ("aws:s3/bucketVersioning:BucketVersioning", "aws_s3_bucket_versioning"),
        ("aws:s3/bucketObjectv2:BucketObjectv2", "aws_s3_object"),
        ("aws:ec2/getAmi:getAmi", "aws_ami"),
        ("aws:index/getCallerIdentity:getCallerIdentity", "aws_caller_identity"),
        ("aws:index/getAvailabilityZones:getAvailabilityZones", "aws_availability_zones"),
    ],
)
def test_types_are_found(token: str, terraform: str) -> None:
    assert find_type(token, KNOWN) == terraform


def test_an_unknown_type_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError, match="aws:ec2/unicorn:Unicorn"):
        find_type("aws:ec2/unicorn:Unicorn", KNOWN)


def test_a_urn_gives_type_and_name() -> None:
    urn = "urn:pulumi:dev::gpufleet::gpufleet:infra:Fleet$aws:autoscaling/group:Group::gpufleet-dev-nodes"
    assert type_token(urn) == "aws:autoscaling/group:Group"
    assert logical_name(urn) == "gpufleet-dev-nodes"
