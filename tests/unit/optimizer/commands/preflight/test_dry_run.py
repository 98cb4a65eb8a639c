"""Dry runs: what EC2 permits, denies or cannot say, and that nothing else is called."""

from __future__ import annotations

import pytest

from optimizer.commands import preflight as running
from optimizer.commands.preflight.dry_run import DRY_RUNS
from tests.plans import sample_plan
from tests.unit.optimizer.commands.preflight.account import NOW, FakeAws, Refusal, aws, context, only, target

__all__ = ["aws"]

check_node, check_reservation = DRY_RUNS
PERMITTED = Refusal("DryRunOperation", 412, "Request would have succeeded, but DryRun flag is set.")
MAKES = sample_plan(purchase={"option": "reserved", "on_demand_base": 0, "fallback": "none"})
NO_ALLOW = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/ann is not authorized to "
    "perform: ec2:RunInstances on resource: arn:aws:ec2:us-east-1:123456789012:instance/* {}. Encoded authorization "
    "failure message: abc"
)
DENY, NONE = "with an explicit deny in a service control policy", "because no identity-based policy allows it"


def test_a_permitted_node_is_asked_for_as_its_launch_template_has_it(aws: FakeAws) -> None:
    aws.answers["RunInstances"] = PERMITTED
    plan = sample_plan()
    assert only(check_node(context(plan, subnet_ids=("subnet-1",)))).level == "ok"
    (asked,) = aws.asked("RunInstances")
    assert (asked["DryRun"], asked["InstanceType"], asked["MaxCount"]) == (True, plan.instance_type, plan.node_count)
    assert asked["SubnetId"] == "subnet-1" and asked["MetadataOptions"] == {"HttpTokens": "required"}
    assert asked["InstanceMarketOptions"] == {"MarketType": "spot"}
    (mapping,) = asked["BlockDeviceMappings"]
    assert mapping["Ebs"]["Encrypted"]


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        (Refusal("UnauthorizedOperation", 403, NO_ALLOW.format(DENY)), "error", "EC2 refuses 2 x p4d.24xlarge"),
        (Refusal("UnauthorizedOperation", 403, NO_ALLOW.format(NONE)), "warning", "EC2 refuses 2 x p4d.24xlarge"),
        (Refusal("RequestLimitExceeded", 503), "unknown", "throttled"),
        (Refusal("VPCIdNotSpecified", 400, "No default VPC for this user"), "unknown", "No default VPC"),
        ({"Instances": []}, "unknown", "no error"),
    ],
)
def test_what_ec2_answers_is_said(aws: FakeAws, answer: Refusal, level: str, says: str) -> None:
    aws.answers["RunInstances"] = answer
    row = only(check_node(context(MAKES)))
    assert row.level == level and says in row.text and row.next_step


def test_a_reservation_is_asked_for_in_the_stacks_placement_group_once_it_is_there(aws: FakeAws) -> None:
    aws.answers["CreateCapacityReservation"] = PERMITTED
    group = "arn:aws:ec2:us-east-1:123456789012:placement-group/gpufleet-dev-cluster-1a2b3c"
    for answer, asked_in in (
        ({"PlacementGroups": [{"GroupArn": group}]}, group),
        ({"PlacementGroups": []}, None),
        (Refusal("UnauthorizedOperation", 403), None),
    ):
        aws.answers["DescribePlacementGroups"] = answer
        assert only(check_reservation(context(MAKES))).level == "ok"
        asked = aws.asked("CreateCapacityReservation")[-1]
        assert (asked["DryRun"], asked.get("PlacementGroupArn"), asked["InstanceCount"]) == (True, asked_in, 2)
    assert not list(check_reservation(context())), "a spot plan makes none"


def test_no_plan_without_an_image_and_no_preflight_of_itself_asks(aws: FakeAws) -> None:
    assert only(check_node(context(sample_plan(node={"gpu": "V100"})))).level == "unknown"
    running.preflight(target(MAKES), stack="dev", at=NOW)
    assert not aws.asked("RunInstances") and not aws.asked("CreateCapacityReservation")
