from __future__ import annotations

import pytest

from infra.config import ConfigError
from optimizer.plan import INTERFACE_ENDPOINTS
from tests.infra.deployed import EXISTING_VPC, LONE_NODE, deploy, reserved


def test_a_gang_runs_in_one_zone_in_a_cluster_placement_group() -> None:
    stack = deploy()
    assert [subnet.inputs["availabilityZone"] for subnet in stack.all("Subnet")] == ["us-east-1a"]
    assert stack.one("PlacementGroup")["strategy"] == "cluster"
    assert stack.one("LaunchTemplate")["placement"]["groupName"] == "gpufleet-dev-cluster"


def test_a_lone_node_may_start_in_any_zone_of_its_plan() -> None:
    stack = deploy(LONE_NODE)
    assert len(stack.all("Subnet")) == 2
    assert len(stack.one("Group")["vpcZoneIdentifiers"]) == 2
    assert not stack.all("PlacementGroup")
    assert "placement" not in stack.one("LaunchTemplate")


def test_the_zone_can_be_chosen_and_must_be_the_plans() -> None:
    assert deploy(config={"gpufleet:zoneId": "use1-az6"}).one("Subnet")["availabilityZone"] == "us-east-1b"
    with pytest.raises(ConfigError, match=r"zoneId use1-az1 does not offer p4d\.24xlarge.*use1-az2, use1-az6"):
        deploy(config={"gpufleet:zoneId": "use1-az1"})


def test_zones_come_from_ec2_where_the_plan_has_none() -> None:
    assert deploy({"zone_ids": []}).one("Subnet")["availabilityZone"] == "us-east-1a"


def test_nothing_leads_to_or_from_the_internet() -> None:
    stack = deploy(config={"gpufleet:alarmEmail": "ops@example.com"})
    for kind in ("InternetGateway", "NatGateway", "Eip", "Route", "KeyPair"):
        assert not stack.all(kind), kind
    assert all(subnet.inputs["mapPublicIpOnLaunch"] is False for subnet in stack.all("Subnet"))
    assert "routes" not in stack.one("RouteTable")
    default = stack.one("DefaultSecurityGroup")
    assert not default.get("ingress") and not default.get("egress")


def test_the_endpoints_are_those_the_plan_pays_for() -> None:
    stack = deploy(LONE_NODE)
    by_type: dict[str, list[str]] = {}
    for endpoint in stack.all("VpcEndpoint"):
        by_type.setdefault(endpoint.inputs["vpcEndpointType"], []).append(endpoint.inputs["serviceName"])
    assert by_type["Gateway"] == ["com.amazonaws.us-east-1.s3"]
    assert sorted(by_type["Interface"]) == [f"com.amazonaws.us-east-1.{name}" for name in INTERFACE_ENDPOINTS]
    for endpoint in stack.all("VpcEndpoint"):
        if endpoint.inputs["vpcEndpointType"] == "Interface":
            assert endpoint.inputs["privateDnsEnabled"] is True
            assert len(endpoint.inputs["subnetIds"]) == 1, "billed per zone"
            assert endpoint.inputs["securityGroupIds"] == ["gpufleet-dev-endpoints-id"]


def test_an_existing_vpc_is_used_and_nothing_is_added_to_it() -> None:
    stack = deploy(config=EXISTING_VPC)
    for kind in ("Vpc", "Subnet", "RouteTable", "VpcEndpoint", "DefaultSecurityGroup"):
        assert not stack.all(kind), kind
    assert stack.one("Group")["vpcZoneIdentifiers"] == ["subnet-0123456789abcdef0"]
    assert stack.one("SecurityGroup")["vpcId"] == "vpc-0123456789abcdef0"


def test_an_existing_reservation_keeps_its_own_placement_group() -> None:
    assert not deploy(reserved("cr-0123456789abcdef0")).all("PlacementGroup")
    assert deploy(reserved()).all("PlacementGroup")


def test_a_range_too_small_for_the_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vpcCidr 10\.0\.0\.0/28"):
        deploy({"node_count": 8, "parallelism": {"data": 64, "micro_batch": 1}}, {"gpufleet:vpcCidr": "10.0.0.0/28"})
