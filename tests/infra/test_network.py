from __future__ import annotations

import ipaddress
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from infra.network import zone_slot
from infra.offline.preview import Answers, resources
from infra.settings import ConfigError
from optimizer.contract.plan import INTERFACE_ENDPOINTS
from tests.infra.deployed import EXISTING_VPC, LONE_NODE, Deployed, as_list, deploy, on_demand, reserved
from tests.plans import ON_DEMAND_P4D, SPOT_P4DE, sample_plan


def test_every_zone_of_an_alternate_has_a_subnet_and_the_group_begins_in_the_plans() -> None:
    changes = {"alternates": [ON_DEMAND_P4D, SPOT_P4DE | {"zone_id": "use1-az4"}], "purchase": {"zone_id": "use1-az2"}}
    stack, alone = deploy(changes), deploy({"purchase": {"zone_id": "use1-az2"}})
    subnets = {subnet.name.removeprefix("gpufleet-dev-"): subnet.inputs for subnet in stack.all("Subnet")}
    assert subnets.keys() == {"use1-az2", "use1-az6", "use1-az4"}
    zones = [group.inputs["vpcZoneIdentifiers"] for group in stack.all("Group")]
    assert zones == [[f"gpufleet-dev-use1-az{zone}-id"] for zone in (2, 2, 6, 4)]
    # The plan's own range and the endpoints stay where they are.
    assert subnets["use1-az2"] == alone.one("Subnet")
    assert_apart([subnet["cidrBlock"] for subnet in subnets.values()])
    endpoints = [
        endpoint.inputs["subnetIds"] for endpoint in stack.all("VpcEndpoint") if "subnetIds" in endpoint.inputs
    ]
    assert endpoints == [["gpufleet-dev-use1-az2-id"]] * len(endpoints)
    assert len({table.inputs["routeTableId"] for table in stack.all("RouteTableAssociation")}) == 1


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


def test_the_endpoints_are_those_the_plan_pays_for() -> None:
    stack = deploy(LONE_NODE)
    endpoints = {endpoint.inputs["serviceName"]: endpoint.inputs for endpoint in stack.all("VpcEndpoint")}
    assert endpoints.pop("com.amazonaws.us-east-1.s3")["vpcEndpointType"] == "Gateway"
    assert sorted(endpoints) == [f"com.amazonaws.us-east-1.{name}" for name in INTERFACE_ENDPOINTS]
    for given in endpoints.values():
        assert (given["vpcEndpointType"], given["privateDnsEnabled"]) == ("Interface", True)
        assert len(given["subnetIds"]) == 1, "billed per zone"
        assert given["securityGroupIds"] == ["gpufleet-dev-endpoints-id"]


def answered(told: Callable[[str, Any], Mapping[str, Any]], config: Mapping[str, str] = {}, **changes: Any) -> Deployed:
    """Declare a stack where AWS answers some look-ups otherwise, as ``told`` of a look-up and its arguments."""

    class Told(Answers):
        def _answer(self, token: str, given: dict[str, Any]) -> dict[str, Any]:
            return {**super()._answer(token, given), **told(token, given)}

    plan = sample_plan(**changes)
    return Deployed(resources(plan, stack="dev", config=config, answers=Told(plan)))


def with_ssm_in(*zones: str, **changes: Any) -> Deployed:
    """Declare a stack where Systems Manager has endpoints in these zones alone."""
    some = {"availabilityZones": list(zones)}
    return answered(lambda _, given: some if given.get("serviceName", "").endswith(".ssm") else {}, **changes)


@pytest.mark.parametrize("changes", [{}, LONE_NODE], ids=["gang", "lone"])
def test_an_endpoint_goes_where_its_service_is(changes: dict[str, Any]) -> None:
    stack = with_ssm_in("us-east-1c", "us-east-1d", **changes)
    assert stack.one("VpcEndpoint", "-ssm")["subnetIds"] == ["gpufleet-dev-endpoints-use1-az1-id"]
    assert stack.one("VpcEndpoint", "-ec2")["subnetIds"] == ["gpufleet-dev-use1-az2-id"]
    small = stack.one("Subnet", "-endpoints-use1-az1")
    assert (small["availabilityZone"], small["cidrBlock"][-3:]) == ("us-east-1c", "/28")
    assert stack.one("RouteTableAssociation", "-endpoints-use1-az1")["routeTableId"] == "gpufleet-dev-private-id"
    assert "gpufleet-dev-endpoints-use1-az1-id" not in stack.one("Group")["vpcZoneIdentifiers"]
    # A gateway would not collide with it, and no other subnet moves.
    ranges = {subnet.name: subnet.inputs["cidrBlock"] for subnet in stack.all("Subnet")}
    everything = deploy(on_demand(), NAT).all("Subnet")
    assert_apart([small["cidrBlock"], *(subnet.inputs["cidrBlock"] for subnet in everything)])
    assert {
        subnet.name: subnet.inputs["cidrBlock"] for subnet in deploy(changes).all("Subnet")
    }.items() < ranges.items()


def test_a_service_is_sought_in_each_zone_and_refused_where_none_has_it() -> None:
    stack = with_ssm_in("us-east-1b", **LONE_NODE)
    assert stack.one("VpcEndpoint", "-ssm")["subnetIds"] == ["gpufleet-dev-use1-az6-id"]
    assert len(stack.all("Subnet")) == 2
    with pytest.raises(ConfigError, match=r"com\.amazonaws\.us-east-1\.ssm \(it is in none\)"):
        with_ssm_in()


def in_subnets(*subnets: dict[str, str], **changes: Any) -> Deployed:
    """Declare a stack in given subnets, s0, s1 and so on."""
    config = EXISTING_VPC | {"gpufleet:subnetIds": json.dumps([f"s{number}" for number in range(len(subnets))])}
    return answered(lambda token, given: subnets[int(given["id"][1:])] if "Subnet" in token else {}, config, **changes)


FIRST, SECOND, THIRD = ({"availabilityZoneId": f"use1-az{number}"} for number in (2, 6, 3))


@pytest.mark.parametrize(
    ("subnets", "told"),
    [
        ([FIRST | {"vpcId": "vpc-0f"}], "in vpc-0f, and gpufleet:vpcId is vpc-0123456789abcdef0"),
        ([THIRD], "in use1-az3, and the plan's nodes start in use1-az2, use1-az6"),
        ([FIRST, SECOND, FIRST], "s2 of .* in use1-az2, as s0 is"),
    ],
    ids=["of another VPC", "without the type", "two of a zone"],
)
def test_a_given_subnet_where_no_node_starts_is_refused(subnets: list[dict[str, str]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        in_subnets(*subnets, **LONE_NODE, **on_demand())
    assert in_subnets(THIRD, **reserved("cr-0123456789abcdef0")).all("Group"), "its owner knows the zone"


NAT = {"gpufleet:nat": "true"}


def test_a_nat_gateway_lets_traffic_out_and_none_in() -> None:
    stack = deploy(config=NAT)
    to_internet, to_gateway = stack.one("Route", "-public-routes"), stack.one("Route", "-private")
    assert to_internet["gatewayId"] == "gpufleet-dev-internet-id"
    assert to_gateway["natGatewayId"] == "gpufleet-dev-nat-id"
    assert to_internet["destinationCidrBlock"] == to_gateway["destinationCidrBlock"] == "0.0.0.0/0"
    assert stack.one("NatGateway")["subnetId"] == "gpufleet-dev-public-id"
    # The gateway alone is in the subnet with a route to the internet gateway, in the fleet's zone.
    associations = [association.inputs for association in stack.all("RouteTableAssociation")]
    tables = {given["subnetId"]: given["routeTableId"] for given in associations}
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
    networks = list(map(ipaddress.ip_network, ranges))
    assert not any(a.overlaps(b) for a, b in itertools.combinations(networks, 2))


def test_the_endpoints_are_for_this_account_alone() -> None:
    stack = deploy()
    for service in INTERFACE_ENDPOINTS:
        (statement,) = stack.policy("VpcEndpoint", f"-{service}").values()
        assert statement["Condition"] == {"StringEquals": {"aws:PrincipalAccount": "000000000000"}}
        assert statement["Action"] == ("cloudwatch:*" if service == "monitoring" else f"{service}:*")
    (statement,) = stack.policy("VpcEndpoint", "-s3").values()
    # Neither foreign credentials nor a foreign bucket.
    assert statement["Condition"] == {
        "StringEquals": {"aws:PrincipalAccount": "000000000000", "aws:ResourceAccount": "000000000000"}
    }


def test_foreign_buckets_are_only_read_where_the_stack_names_them_or_has_a_nat_gateway() -> None:
    assert deploy().policy("VpcEndpoint", "-s3").keys() == {"OwnBuckets"}
    named = deploy(config={"gpufleet:data": "s3://theirs/corpus"}).policy("VpcEndpoint", "-s3")
    assert named.keys() == {"OwnBuckets", "ReadData", "ListData"}
    assert (named["ReadData"]["Action"], named["ReadData"]["Resource"]) == (
        "s3:GetObject",
        ["arn:aws:s3:::theirs/corpus/*"],
    )
    anywhere = deploy(config=NAT).policy("VpcEndpoint", "-s3")["ReadAnywhere"]
    assert anywhere["Action"] == ["s3:GetObject", "s3:ListBucket"]


def test_every_service_of_the_nodes_role_has_an_endpoint() -> None:
    stack = deploy()
    services = {
        statement["Action"].removesuffix(":*")
        for endpoint in stack.all("VpcEndpoint")
        for statement in stack.policy("VpcEndpoint", endpoint.name).values()
    }
    allowed = [one for one in stack.policy("RolePolicy", "-node").values() if one["Effect"] == "Allow"]
    actions = [action for statement in allowed for action in as_list(statement["Action"])]
    # S3 and Parameter Store call KMS, and not the node (kms:ViaService).
    assert {action.split(":")[0] for action in actions} - {"kms"} == services


def test_a_zone_has_its_own_range_whatever_other_zones_there_are() -> None:
    assert [zone_slot(f"use1-az{number}") for number in (1, 2, 6)] == [0, 1, 5]
    for wrong in ("use1-az0", "use1-az8", "us-east-1a", ""):
        with pytest.raises(ConfigError, match="expected an id like use1-az1"):
            zone_slot(wrong)


def test_the_group_goes_to_the_zone_that_the_spot_price_is_of() -> None:
    priced = {"purchase": {"zone_id": "use1-az6"}}
    assert deploy(priced).one("Subnet")["availabilityZone"] == "us-east-1b"
    assert deploy(LONE_NODE | priced).one("Subnet")["availabilityZone"] == "us-east-1b"
    assert deploy(priced, config={"gpufleet:zoneId": "use1-az2"}).one("Subnet")["availabilityZone"] == "us-east-1a"
