"""The deployer's policy allows each call that the real engine and provider made, and nothing else without a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pulumi_aws
import pytest

from infra.naming import Names
from infra.policies.deployer import MANAGED_POLICY_LIMIT, WITHOUT_A_CALL, deployer_documents, deployer_policy
from optimizer.commands.preflight.model import preflight_policy
from tests.engine.recording import Question
from tests.infra.deployed import as_list

NAMES = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")
CALLS = Path(__file__).with_name("deployer_calls.json")
"""Recorded by tests/engine (GPUFLEET_RECORD_CALLS=1 adds what is new), whose every run judges the calls of its own."""
# Calls whose refusal the provider takes: it then asks STS for the account, and reads an image without its UEFI data.
MAY_BE_REFUSED = {"iam:GetUser", "ec2:GetInstanceUefiData"}
# Condition keys whose value a question has behind its ARN.
BEHIND_THE_ARN = ("ec2:CreateAction", "iam:PassedToService")


def recorded() -> set[Question]:
    """Return the recorded calls."""
    return {Question(*fields) for fields in json.loads(CALLS.read_text(encoding="utf-8"))}


def allows(policy: dict[str, Any], question: Question) -> bool:
    """Evaluate a policy that only allows.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
    """
    return any(
        question.action in as_list(statement["Action"])
        and any(fnmatchcase(question.resource.partition("#")[0], pattern) for pattern in as_list(statement["Resource"]))
        and _holds(statement.get("Condition", {}), question)
        for statement in policy["Statement"]
    )


def _holds(condition: dict[str, Any], question: Question) -> bool:
    context = {
        "aws:RequestedRegion": NAMES.region,
        "aws:RequestTag/gpufleet:stack": question.requested,
        "aws:ResourceTag/gpufleet:stack": question.tagged,
        **dict.fromkeys(BEHIND_THE_ARN, question.resource.partition("#")[2]),
    }
    for operator, keys in condition.items():
        for key, wanted in keys.items():
            value = context.get(key, "")
            if operator == "Null":
                if (value == "") != (wanted == "true"):
                    return False
            elif operator in ("StringEquals", "ArnEquals"):
                if value not in as_list(wanted):
                    return False
            else:
                return False
    return True


def denied(calls: Iterable[Question]) -> list[Question]:
    """Return the calls of a stack "dev" that the printed documents do not allow, and that must succeed."""
    policy = deployer_policy(NAMES, lustre=True)
    read = {action for one in preflight_policy()["Statement"] for action in as_list(one["Action"])}
    return [call for call in sorted(calls) if call.action not in read | MAY_BE_REFUSED and not allows(policy, call)]


def test_every_call_is_allowed_and_every_action_is_called() -> None:
    calls = recorded()
    assert len(calls) > 300 and denied(calls) == []
    policy = deployer_policy(NAMES, lustre=True)
    actions = {action for statement in policy["Statement"] for action in as_list(statement["Action"])}
    uncalled = actions - {call.action for call in calls}
    assert uncalled <= WITHOUT_A_CALL.keys()
    assert WITHOUT_A_CALL.keys() - uncalled == {"iam:PutRolePermissionsBoundary"}, "a reason that nothing needs"


def test_another_stacks_resources_are_out_of_reach() -> None:
    policy = deployer_policy(NAMES, lustre=True)
    for call in recorded():
        if call.action in policy["Statement"][0]["Action"] or call.resource == "*":
            continue
        other = Question(
            call.action,
            *(text.replace("dev", "prod") for text in (call.resource, call.requested, call.tagged)),
        )
        assert not allows(policy, other), other
        assert not allows(policy, Question(call.action, call.resource.replace("123456789012", "210987654321")))


# Actions of AWS that each look-up of the program needs; STS answers get_caller_identity without permission:
# https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html
LOOK_UPS = {
    "get_ami": "ec2:DescribeImages",
    "get_availability_zones": "ec2:DescribeAvailabilityZones",
    "get_caller_identity": "",
    "get_instance_type_offerings": "ec2:DescribeInstanceTypeOfferings",
    "get_parameter": "ssm:GetParameter",
    "get_partition": "",
    "get_subnet": "ec2:DescribeSubnets",
    "get_vpc_endpoint_service": "ec2:DescribeVpcEndpointServices",
}


def look_ups(text: str) -> set[str]:
    """Look-ups of pulumi_aws that a source names in any way: as a function, an import, or a text for getattr."""
    provider = Path(pulumi_aws.__file__).parent
    functions = {path.stem for path in provider.rglob("get_*.py")}
    # Pulumi itself has functions of the same names.
    words = set(re.findall(r"\w+", re.sub(r"pulumi\.(get_stack|Config\(\"gpufleet\"\)\.get_object)", "", text)))
    found = {word.removesuffix("_output") for word in words} & functions
    readers = re.findall(r"\baws\.[\w.]+\.get\(|get_\" ?\+|get_\{|runtime\.invoke|\bboto\w+", text)
    return found | set(readers)


def test_every_look_up_of_the_program_is_allowed(repository: Path) -> None:
    """Plans reach different look-ups, so a recorded deployment does not show all."""
    sources = [path.read_text(encoding="utf-8") for path in (repository / "infra").rglob("*.py")]
    found, allowed = set().union(*map(look_ups, sources)), deployer_policy(NAMES)["Statement"][0]["Action"]
    assert found == LOOK_UPS.keys()
    assert {LOOK_UPS[name] for name in found} - {""} <= set(allowed)


@pytest.mark.parametrize(
    "text",
    [
        "from pulumi_aws.ec2 import get_vpc as find", "cloud = aws.ec2\ncloud.get_vpc_output(id=vpc)",
        "ask(aws.ec2, 'get_vpc')", "getattr(aws.ec2, f'get_{name}')", "aws.ec2.Vpc.get('vpc', vpc)",
        "pulumi.runtime.invoke('aws:ec2/getVpc:getVpc', {})", "from boto3 import client", "import botocore.session",
    ],
)  # fmt: skip
def test_no_form_of_a_look_up_is_overlooked(text: str) -> None:
    assert look_ups(text) - LOOK_UPS.keys()


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        # The engine stories move nothing, and the emulator ends each refresh at once.
        ("s3:AbortMultipartUpload", f"{NAMES.bucket_arn}/checkpoints/step-1"),
        ("autoscaling:CancelInstanceRefresh", NAMES.group_arns[0]),
        # The newer provider asks so.
        *((f"s3:{verb}", NAMES.bucket_arn) for verb in ("ListTagsForResource", "TagResource", "UntagResource")),
    ],
)
def test_calls_that_no_recording_has_are_allowed_for_the_stack_alone(action: str, resource: str) -> None:
    policy = deployer_policy(NAMES)
    assert allows(policy, Question(action, resource))
    assert not allows(policy, Question(action, resource.replace("dev", "prod")))


def test_a_tag_can_go_from_everything_that_got_it() -> None:
    """gpufleet:tags without one of its tags: the service-linked role has them too."""
    policy = deployer_policy(NAMES, lustre=True)
    tagged = {call.resource for call in recorded() if call.action == "iam:TagRole"}
    assert any("aws-service-role" in arn for arn in tagged)
    assert [arn for arn in tagged if not allows(policy, Question("iam:UntagRole", arn))] == []


def test_endpoints_may_get_the_private_names_that_ec2_asks_route_53_for() -> None:
    """moto asks Route 53 for nothing. A person's VPC gets no endpoints."""
    question = Question("route53:AssociateVPCWithHostedZone", "arn:aws:route53:::hostedzone/Z1")
    assert allows(deployer_policy(NAMES), question)
    assert not allows(deployer_policy(NAMES, vpc_id="vpc-1"), question)


def test_a_boundary_is_demanded_of_each_role() -> None:
    boundary = "arn:aws:iam::123456789012:policy/limits"
    policy = deployer_policy(NAMES, boundary=boundary)
    statements = {one["Sid"]: one for one in policy["Statement"]}
    assert statements["BoundedRoles"]["Condition"] == {"StringEquals": {"iam:PermissionsBoundary": boundary}}
    assert not {"iam:CreateRole", "iam:PutRolePolicy"} & set(statements["Roles"]["Action"])
    assert statements["Roles"]["Resource"] == "arn:aws:iam::123456789012:role/gpufleet-dev-*"
    assert not any("DeleteRolePermissionsBoundary" in str(one) for one in statements.values())


def test_an_existing_vpc_is_named_and_nothing_asked_of_what_a_stack_does_not_have() -> None:
    statements = {one["Sid"]: one for one in deployer_policy(NAMES, vpc_id="vpc-1")["Statement"]}
    assert statements["InVpc"]["Resource"].endswith("vpc/vpc-1")
    assert "AdoptDefaultGroup" not in statements and "fsx" not in str(statements)


@pytest.mark.parametrize("boundary", ["", "arn:aws:iam::123456789012:policy/" + "b" * 100])
def test_each_part_fits_into_a_managed_policy(boundary: str) -> None:
    longest = Names(stack="s" * 22, account_id="1" * 12, region="ap-southeast-2", partition="aws-us-gov")
    policy = deployer_policy(longest, boundary=boundary, lustre=True)
    parts = deployer_documents(policy)
    assert [one for part in parts for one in part["Statement"]] == policy["Statement"]
    assert all(len(json.dumps(part, separators=(",", ":"))) <= MANAGED_POLICY_LIMIT for part in parts)
    assert len(parts) <= 3
