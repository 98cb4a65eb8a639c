from __future__ import annotations

from typing import Any

import pytest

from infra.fleet import interfaces
from infra.naming import Names
from tests.infra.deployed import LONE_NODE, Deployed, deploy, on_demand, reserved
from tests.plans import sample_plan

OPTIONS: dict[str, dict[str, Any]] = {
    "spot": {},
    "on-demand": on_demand(),
    "reserved": reserved(),
    "own-reservation": reserved("cr-0123456789abcdef0"),
}


@pytest.fixture(scope="module", params=list(OPTIONS))
def stack(request: pytest.FixtureRequest) -> Deployed:
    return deploy(OPTIONS[request.param])


def test_a_template_node_is_locked_down_whatever_the_purchase(stack: Deployed) -> None:
    template = stack.one("LaunchTemplate")
    assert template["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1,
        "instanceMetadataTags": "disabled",
    }
    (volume,) = template["blockDeviceMappings"]
    assert volume["deviceName"] == "/dev/sda1"
    assert volume["ebs"] == {
        "volumeType": "gp3",
        "volumeSize": 200,
        "iops": 3000,
        "throughput": 250,
        "encrypted": "true",
        "kmsKeyId": "arn:aws:kms:::gpufleet-dev-key",
        "deleteOnTermination": "true",
    }
    assert template["ebsOptimized"] == "true"
    assert template["instanceInitiatedShutdownBehavior"] == "terminate"
    assert template["instanceType"] == "p4d.24xlarge"
    assert template["imageId"] == "ami-00000000000000000"
    assert template["updateDefaultVersion"] is True
    for absent in ("keyName", "instanceMarketOptions", "vpcSecurityGroupIds", "disableApiTermination"):
        assert absent not in template


def test_every_node_is_tagged_with_its_volume_and_interfaces(stack: Deployed) -> None:
    specifications = stack.one("LaunchTemplate")["tagSpecifications"]
    assert {found["resourceType"] for found in specifications} == {"instance", "volume", "network-interface"}
    for found in specifications:
        assert found["tags"]["gpufleet:stack"] == "dev"
    assert {tag["key"]: tag["propagateAtLaunch"] for tag in stack.one("Group")["tags"]} == {
        "Project": True,
        "gpufleet:model": True,
        "gpufleet:stack": True,
    }


def test_the_group_has_the_plans_size_and_keeps_its_nodes(stack: Deployed) -> None:
    group = stack.one("Group")
    assert [group[key] for key in ("minSize", "maxSize", "desiredCapacity")] == [2, 2, 2]
    assert group["protectFromScaleIn"] is True
    assert group["capacityRebalance"] is False
    assert group["suspendedProcesses"] == ["AZRebalance"]
    assert group["waitForCapacityTimeout"] == "0"
    assert group["forceDelete"] is True
    assert group["healthCheckType"] == "EC2"
    assert group["name"] == "gpufleet-dev-nodes"


def test_hooks_exist_before_the_first_instance_and_stay_changeable(stack: Deployed) -> None:
    initial = {hook["name"]: hook for hook in stack.one("Group")["initialLifecycleHooks"]}
    managed = {hook.inputs["name"]: dict(hook.inputs) for hook in stack.all("LifecycleHook")}
    assert initial.keys() == managed.keys() == {Names.launch_hook, Names.terminate_hook}
    for name, hook in initial.items():
        assert managed[name].pop("autoscalingGroupName") == "gpufleet-dev-nodes"
        assert managed[name] == hook
        assert hook["defaultResult"] == "ABANDON"
        # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_PutLifecycleHook.html
        assert 30 <= hook["heartbeatTimeout"] <= 7200
    assert initial[Names.launch_hook]["lifecycleTransition"] == "autoscaling:EC2_INSTANCE_LAUNCHING"
    assert initial[Names.terminate_hook]["lifecycleTransition"] == "autoscaling:EC2_INSTANCE_TERMINATING"


def test_spot_buys_the_base_on_demand_and_the_rest_where_capacity_is_deepest() -> None:
    group = deploy().one("Group")
    assert "launchTemplate" not in group
    policy = group["mixedInstancesPolicy"]
    assert policy["instancesDistribution"] == {
        "onDemandBaseCapacity": 1,
        "onDemandPercentageAboveBaseCapacity": 0,
        "spotAllocationStrategy": "price-capacity-optimized",
    }
    assert policy["launchTemplate"]["launchTemplateSpecification"] == {
        "launchTemplateId": "gpufleet-dev-node-id",
        "version": "1",
    }
    assert policy["launchTemplate"]["overrides"] == [{"instanceType": "p4d.24xlarge"}]


@pytest.mark.parametrize("option", ["on-demand", "reserved", "own-reservation"])
def test_nothing_but_spot_buys_spot(option: str) -> None:
    group = deploy(OPTIONS[option]).one("Group")
    assert "mixedInstancesPolicy" not in group
    assert group["launchTemplate"] == {"id": "gpufleet-dev-node-id", "version": "1"}


def test_a_new_reservation_holds_exactly_the_fleet_and_only_the_fleet_uses_it() -> None:
    stack = deploy(reserved())
    reservation = stack.one("CapacityReservation")
    assert reservation["instanceCount"] == 2
    assert reservation["instanceType"] == "p4d.24xlarge"
    assert reservation["instanceMatchCriteria"] == "targeted"
    assert reservation["availabilityZone"] == stack.one("Subnet")["availabilityZone"]
    assert reservation["placementGroupArn"].endswith("gpufleet-dev-cluster")
    assert stack.one("LaunchTemplate")["capacityReservationSpecification"] == {
        "capacityReservationTarget": {"capacityReservationId": "gpufleet-dev-nodes-id"}
    }


def test_an_own_reservation_is_used_and_no_second_one_is_paid_for() -> None:
    stack = deploy(OPTIONS["own-reservation"])
    assert not stack.all("CapacityReservation")
    assert stack.one("LaunchTemplate")["capacityReservationSpecification"] == {
        "capacityReservationTarget": {"capacityReservationId": "cr-0123456789abcdef0"}
    }


@pytest.mark.parametrize("option", ["spot", "on-demand"])
def test_no_other_fleet_touches_a_reservation(option: str) -> None:
    stack = deploy(OPTIONS[option])
    assert not stack.all("CapacityReservation")
    assert "capacityReservationSpecification" not in stack.one("LaunchTemplate")


@pytest.mark.parametrize(
    ("cards", "efa", "first", "expected_efa"),
    [(4, 4, "efa", 4), (32, 32, "efa", 32), (16, 16, "efa", 16), (17, 16, "interface", 16), (1, 1, "efa", 1)],
    ids=["p4d", "p5", "p5en", "p6-b300", "g5.12xlarge"],
)
def test_every_card_has_its_interface(cards: int, efa: int, first: str, expected_efa: int) -> None:
    stack = deploy({"node": {"network_cards": cards, "efa_cards": efa}})
    found = stack.one("LaunchTemplate")["networkInterfaces"]
    assert [card["networkCardIndex"] for card in found] == list(range(cards))
    assert [card["deviceIndex"] for card in found] == [0] + [1] * (cards - 1)
    assert found[0]["interfaceType"] == first
    assert {card["interfaceType"] for card in found[1:]} <= {"efa-only"}
    assert sum(card["interfaceType"].startswith("efa") for card in found) == expected_efa
    assert all(card["securityGroups"] == ["gpufleet-dev-nodes-id"] for card in found)
    assert all(card["deleteOnTermination"] == "true" for card in found)
    # EC2 refuses the argument for several interfaces, and a lone one must say no.
    assert [card.get("associatePublicIpAddress") for card in found] == (["false"] if cards == 1 else [None] * cards)


def test_without_efa_there_is_one_plain_interface_on_the_first_card() -> None:
    (card,) = interfaces(sample_plan(node={"efa_cards": 0}).node, "sg-1")
    assert (card.network_card_index, card.device_index, card.interface_type) == (0, 0, "interface")
    assert card.associate_public_ip_address == "false"


def test_size_follows_the_plan_in_every_place() -> None:
    stack = deploy({**LONE_NODE, **reserved()})
    assert [stack.one("Group")[key] for key in ("minSize", "maxSize", "desiredCapacity")] == [1, 1, 1]
    assert stack.one("CapacityReservation")["instanceCount"] == 1
    assert "placementGroupArn" not in stack.one("CapacityReservation")
