from __future__ import annotations

import base64
from typing import Any

import pulumi
import pulumi_aws as aws
import pytest

from infra.naming import Names
from infra.offline.preview import Recorder
from tests.infra.deployed import (
    WORKERS,
    Deployed,
    block_row,
    capacity_block,
    deploy,
    deploy_anew,
    on_demand,
    reserved,
    workers,
)
from tests.plans import SPOT_P4DE, sample_plan

OPTIONS: dict[str, dict[str, Any]] = {
    "spot": {},
    "on-demand": on_demand(),
    "reserved": reserved(),
    "own-reservation": reserved("cr-0123456789abcdef0"),
    "capacity-block": capacity_block(),
}


@pytest.fixture(scope="module", params=list(OPTIONS))
def stack(request: pytest.FixtureRequest) -> Deployed:
    return deploy(OPTIONS[request.param])


def test_destroy_waits_for_the_last_node_and_up_moves_what_scales_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is force-deleted stays "pending delete" until its instances are gone, trn1's after 15 minutes."""
    waits, moved = dict[str, str](), set[str]()
    register = Recorder.RegisterResource

    def noted(self: Recorder, request: Any) -> Any:
        waits[request.type.rpartition(":")[2]] = request.customTimeouts.delete
        moved.update(request.name for alias in request.aliases if alias.spec.parentUrn.endswith(":Scaling::scaling"))
        return register(self, request)

    monkeypatch.setattr(Recorder, "RegisterResource", noted)
    deploy_anew(capacity_block())
    assert {kind for kind, longest in waits.items() if longest == "60m"} == {"Group", "SecurityGroup", "Subnet"}
    deploy_anew(WORKERS, workers(scaling={"minNodes": 1, "gpuUtilizationPercent": 60}))
    # `up` keeps those of a running stack, beside which AWS takes no second.
    assert moved == {"gpufleet-dev-block-end", "gpufleet-dev-gpu-utilization"}


@pytest.mark.parametrize("option", ["spot", "on-demand", "reserved", "own-reservation"])
def test_nothing_but_its_controller_takes_a_node_from_a_gang(option: str) -> None:
    group = deploy(OPTIONS[option]).one("Group")
    assert group["protectFromScaleIn"] is True and "instanceRefresh" not in group


def test_a_block_is_drained_before_its_end_also_without_the_controller() -> None:
    stack = deploy(capacity_block())
    group = stack.one("Group")
    # The scheduled action could not take protected nodes.
    assert group["protectFromScaleIn"] is False
    assert stack.one("Schedule") == {
        "scheduledActionName": "gpufleet-dev-block-end",
        "autoscalingGroupName": "gpufleet-dev-nodes",
        "desiredCapacity": 0,
        # Workers keep a smallest size, below which AWS takes no wanted one.
        "minSize": 0,
        "maxSize": -1,
        "startTime": "2099-06-02T08:25:00Z",
    }
    with_offset = {"start": "2099-06-01T11:00:00+02:00", "end": "2099-06-02T11:00:00+02:00"}
    assert deploy(capacity_block(**with_offset)).one("Schedule") == stack.one("Schedule")
    # Auto Scaling refuses a time in the past, and drops an action that has run.
    over = {"start": "2026-06-01T09:00:00Z", "end": "2026-06-02T09:00:00Z"}
    assert not deploy(capacity_block(**over)).all("Schedule")


def test_each_of_several_blocks_has_a_group_and_the_market_follows() -> None:
    stack = deploy(block_row(2))
    templates = stack.all("LaunchTemplate")
    reserved = [template.inputs.get("capacityReservationSpecification") for template in templates]
    targets = [one and one["capacityReservationTarget"]["capacityReservationId"] for one in reserved]
    assert targets == ["cr-0123456789abcdef0", "cr-0123456789abcdef1", None]
    assert [bool(template.inputs.get("instanceMarketOptions")) for template in templates] == [True, True, False]
    assert [group.inputs["protectFromScaleIn"] for group in stack.all("Group")] == [False, False, True]
    schedules = {each.inputs["autoscalingGroupName"]: each.inputs["startTime"] for each in stack.all("Schedule")}
    assert schedules == {"gpufleet-dev-nodes": "2099-06-02T08:25:00Z", "gpufleet-dev-nodes-2": "2099-06-03T08:25:00Z"}
    # A block may belong to another placement group; the market's nodes have one of the stack's.
    assert len(stack.all("PlacementGroup")) == 1


def test_each_place_has_its_own_template_placement_group_and_group_of_one_market() -> None:
    stack = deploy(on_demand(alternates=[SPOT_P4DE]))
    own, other = stack.all("Group")
    assert [group.inputs["name"] for group in (own, other)] == ["gpufleet-dev-nodes", "gpufleet-dev-nodes-2"]
    assert "mixedInstancesPolicy" not in own.inputs
    policy = other.inputs["mixedInstancesPolicy"]
    assert policy["instancesDistribution"]["onDemandBaseCapacity"] == 0
    assert policy["launchTemplate"]["overrides"] == [{"instanceType": "p4de.24xlarge"}]
    assert own.inputs["vpcZoneIdentifiers"] != other.inputs["vpcZoneIdentifiers"]
    templates = {template.name: template.inputs for template in stack.all("LaunchTemplate")}
    assert templates["gpufleet-dev-node-2"]["instanceType"] == "p4de.24xlarge"
    placed = {name: inputs["placement"]["groupName"] for name, inputs in templates.items()}
    assert len(set(placed.values())) == 2 and len(stack.all("PlacementGroup")) == 2
    # A node finds its gang by its group's name.
    for name, group in (("gpufleet-dev-node", own), ("gpufleet-dev-node-2", other)):
        user_data = base64.b64decode(templates[name]["userData"]).decode()
        assert f"GPUFLEET_ASG_NAME={group.inputs['name']}\n" in user_data
    assert len(stack.all("LifecycleHook")) == 4


@pytest.mark.parametrize(
    ("cards", "efa", "efa_at"),
    [
        (4, 4, [(0, 1), (1, 0), (2, 0), (3, 0)]),
        (32, 32, [(0, 1), *((card, 0) for card in range(1, 32))]),
        (17, 16, [(card, 0) for card in range(1, 17)]),
        (1, 1, [(0, 1)]),
    ],
    ids=["p4d", "p5", "p6-b300", "g5.12xlarge"],
)
def test_every_card_with_efa_has_its_interface(cards: int, efa: int, efa_at: list[tuple[int, int]]) -> None:
    """Indexes as on AWS's page: the address on card 0 device 0, EFA on card 0 device 1 and device 0 of the others."""
    declared = deploy({"node": {"network_cards": cards, "efa_cards": efa}}).one("LaunchTemplate")["networkInterfaces"]
    at = [(item["networkCardIndex"], item["deviceIndex"]) for item in declared]
    assert at == [(0, 0), *efa_at]
    assert [item["interfaceType"] for item in declared] == ["interface"] + ["efa-only"] * efa
    assert all(card["securityGroups"] == ["gpufleet-dev-nodes-id"] for card in declared)
    assert all(card["deleteOnTermination"] == "true" for card in declared)
    # EC2 refuses the argument for several interfaces, and a lone one must say no.
    assert not any("associatePublicIpAddress" in card for card in declared)


def test_without_efa_there_is_one_plain_interface_on_the_first_card() -> None:
    (card,) = deploy({"node": {"efa_cards": 0}}).one("LaunchTemplate")["networkInterfaces"]
    assert (card["networkCardIndex"], card["deviceIndex"], card["interfaceType"]) == (0, 0, "interface")
    assert card["associatePublicIpAddress"] == "false"


def test_the_terminate_hook_waits_for_the_plans_checkpoint_and_the_node_knows_how_long() -> None:
    large = {"job": {"checkpoint_gib": 782.0}}
    stack = deploy(large)
    timeouts = {hook.inputs["name"]: hook.inputs["heartbeatTimeout"] for hook in stack.all("LifecycleHook")}
    assert timeouts[Names.terminate_hook] == sample_plan(**large).terminate_timeout_s == 1063
    assert "GPUFLEET_SCALE_IN_LIMIT_S=1003\n" in stack.user_data


def test_workers_come_and_go_one_by_one() -> None:
    stack = deploy(WORKERS, workers(scaling={"minNodes": 1, "gpuUtilizationPercent": 60}))
    group = stack.one("Group")
    assert (group["minSize"], group["maxSize"]) == (0, 2) and "desiredCapacity" not in group
    # Scaling could not take a protected one; a changed template starts a refresh, which passes those at work by.
    assert group["protectFromScaleIn"] is False
    assert group["instanceRefresh"]["preferences"]["scaleInProtectedInstances"] == "Ignore"
    assert group["defaultInstanceWarmup"] == 300
    assert len(group["vpcZoneIdentifiers"]) == 2 and not stack.all("PlacementGroup")


@pytest.mark.parametrize("given", [[], [WORKERS, workers()]])
def test_what_the_controller_changes_is_not_set_back(monkeypatch: pytest.MonkeyPatch, given: list[Any]) -> None:
    """Pulumi's stand-in engine does not tell what a group ignores."""
    ignored: list[Any] = []
    real = aws.autoscaling.Group

    def group(resource: str, *, opts: pulumi.ResourceOptions, **arguments: Any) -> aws.autoscaling.Group:
        ignored.append(opts.ignore_changes)
        return real(resource, opts=opts, **arguments)

    monkeypatch.setattr("infra.place_group.aws.autoscaling.Group", group)
    deploy_anew(*given)
    assert ignored and all({"desiredCapacityType", "minSize", "maxSize"} < set(left) for left in ignored)
