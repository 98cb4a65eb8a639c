from __future__ import annotations

import ipaddress
import itertools
from typing import Any

import pytest

from infra.settings import ConfigError
from optimizer.plan import INTERFACE_ENDPOINTS
from tests.infra.deployed import (
    ALARM,
    EKS,
    EXISTING_VPC,
    LONE_NODE,
    Deployed,
    capacity_block,
    deploy,
    on_demand,
    reserved,
)


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
    stack = deploy(config=ALARM)
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


NAT = {"gpufleet:nat": "true"}


def test_a_nat_gateway_is_a_way_out_and_none_in() -> None:
    stack = deploy(config=NAT)
    to_internet, to_gateway = stack.one("Route", "-public-routes"), stack.one("Route", "-private")
    assert to_internet["gatewayId"] == "gpufleet-dev-internet-id"
    assert to_gateway["natGatewayId"] == "gpufleet-dev-nat-id"
    assert to_internet["destinationCidrBlock"] == to_gateway["destinationCidrBlock"] == "0.0.0.0/0"
    assert stack.one("NatGateway")["subnetId"] == "gpufleet-dev-public-id"
    # Only the gateway is in the subnet with a route to the internet gateway, in the fleet's own zone.
    tables = {each.inputs["subnetId"]: each.inputs["routeTableId"] for each in stack.all("RouteTableAssociation")}
    assert tables == {
        "gpufleet-dev-use1-az2-id": "gpufleet-dev-private-id",
        "gpufleet-dev-public-id": "gpufleet-dev-public-routes-id",
    }
    assert stack.one("Subnet", "-public")["availabilityZone"] == stack.one("Subnet", "-use1-az2")["availabilityZone"]
    assert stack.one("Group")["vpcZoneIdentifiers"] == ["gpufleet-dev-use1-az2-id"]
    (anywhere,) = [
        rule.inputs for rule in stack.all("SecurityGroupEgressRule") if rule.inputs.get("cidrIpv4") == "0.0.0.0/0"
    ]
    assert (anywhere["ipProtocol"], anywhere["fromPort"], anywhere["toPort"]) == ("tcp", 443, 443)
    assert [rule.name for rule in stack.all("SecurityGroupIngressRule")] == [
        rule.name for rule in deploy().all("SecurityGroupIngressRule")
    ]


def assert_apart(ranges: list[str]) -> None:
    networks = [ipaddress.ip_network(each) for each in ranges]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(networks, 2))


@pytest.mark.parametrize("changes", [{}, LONE_NODE], ids=["gang", "lone"])
def test_turning_the_nat_gateway_on_moves_no_subnet_of_nodes(changes: dict[str, Any]) -> None:
    def ranges(stack: Deployed) -> dict[str, str]:
        return {subnet.name: subnet.inputs["cidrBlock"] for subnet in stack.all("Subnet")}

    without, with_ = ranges(deploy(changes)), ranges(deploy(changes, NAT))
    assert with_.keys() - without.keys() == {"gpufleet-dev-public"}
    assert without.items() < with_.items()
    assert_apart(list(with_.values()))


def endpoint_policy(stack: Deployed, service: str) -> dict[str, dict[str, Any]]:
    return stack.policy("VpcEndpoint", f"-{service}")


def test_the_endpoints_are_for_this_account_alone() -> None:
    stack = deploy()
    for service in INTERFACE_ENDPOINTS:
        (statement,) = endpoint_policy(stack, service).values()
        assert statement["Condition"] == {"StringEquals": {"aws:PrincipalAccount": "000000000000"}}
        assert statement["Action"] == ("cloudwatch:*" if service == "monitoring" else f"{service}:*")
    (statement,) = endpoint_policy(stack, "s3").values()
    # Neither a stranger's credentials, nor a stranger's bucket.
    assert statement["Condition"] == {
        "StringEquals": {"aws:PrincipalAccount": "000000000000", "aws:ResourceAccount": "000000000000"}
    }


def test_what_lies_elsewhere_in_s3_is_read_only_where_somebody_asked_for_a_way_out() -> None:
    assert endpoint_policy(deploy(), "s3").keys() == {"OwnBuckets"}
    assert endpoint_policy(deploy(config=NAT), "s3")["ReadAnywhere"]["Action"] == ["s3:GetObject", "s3:ListBucket"]
    layers = endpoint_policy(deploy(on_demand(), {**EKS, **NAT}), "s3")["ImageLayers"]
    assert layers["Action"] == "s3:GetObject"
    assert layers["Resource"] == "arn:aws:s3:::prod-us-east-1-starport-layer-bucket/*"


def test_what_the_nodes_do_goes_through_an_endpoint_they_have() -> None:
    """No NAT gateway is needed for AWS: every action of the nodes' role has a door."""
    stack = deploy()
    doors = {
        action.removesuffix(":*")
        for endpoint in stack.all("VpcEndpoint")
        for statement in stack.policy("VpcEndpoint", endpoint.name).values()
        for action in [statement["Action"]]
    }
    statements = stack.policy("RolePolicy", "-node").values()
    actions = [
        action
        for each in statements
        for action in ([each["Action"]] if isinstance(each["Action"], str) else each["Action"])
    ]
    # KMS is called by S3 and Parameter Store, not by the node (kms:ViaService).
    assert {action.split(":")[0] for action in actions} - {"kms"} == doors


def test_a_kubernetes_control_plane_has_small_subnets_in_two_zones() -> None:
    stack = deploy(on_demand(), {**EKS, **NAT})
    found = [subnet.inputs for subnet in stack.all("Subnet") if "-control-plane-" in subnet.name]
    assert {subnet["availabilityZone"] for subnet in found} == {"us-east-1a", "us-east-1b"}
    assert all(subnet["cidrBlock"].endswith("/28") for subnet in found)
    assert_apart([subnet.inputs["cidrBlock"] for subnet in stack.all("Subnet")])
    assert not [subnet for subnet in deploy().all("Subnet") if "-control-plane-" in subnet.name]


def test_a_capacity_block_is_in_one_zone() -> None:
    assert len(deploy({**LONE_NODE, **capacity_block()}).all("Subnet")) == 1


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
