from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infra.naming import Names
from infra.policies.resources import EVENTS, key_policy
from infra.policies.roles import node_policy
from tests.infra.deployed import ALARM, EXISTING_VPC, WORKERS, deploy, workers

NAMES = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")


def actions(statement: dict[str, Any]) -> list[str]:
    found = statement["Action"]
    return found if isinstance(found, list) else [found]


def resources(statement: dict[str, Any]) -> list[str]:
    found = statement["Resource"]
    return found if isinstance(found, list) else [found]


def test_the_key_rotates_and_only_named_principals_use_it() -> None:
    stack = deploy()
    assert stack.one("Key")["enableKeyRotation"] is True
    assert stack.one("Key")["deletionWindowInDays"] == 30
    statements = stack.policy("Key")
    service_role = "arn:aws:iam:::gpufleet-dev-auto-scaling"
    assert statements["AutoScalingUsesKey"]["Principal"] == {"AWS": service_role}
    grant = statements["AutoScalingAttachesVolumes"]
    assert (grant["Principal"], grant["Action"]) == ({"AWS": service_role}, "kms:CreateGrant")
    assert grant["Condition"] == {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    assert stack.one("ServiceLinkedRole")["awsServiceName"] == "autoscaling.amazonaws.com"
    assert stack.one("Group")["serviceLinkedRoleArn"] == service_role
    for name, statement in statements.items():
        assert statement["Effect"] == "Allow"
        assert "*" not in json.dumps(statement["Principal"]), name
        if "Service" in statement["Principal"]:
            assert statement["Condition"], f"{name}: a service without a condition is anyone's confused deputy"
        if name != "AccountAdministersKey":
            assert not any(action in ("*", "kms:*") for action in actions(statement))
    rules = statements["EventBridgeSendsToQueue"]["Condition"]["ArnEquals"]["aws:SourceArn"]
    assert rules == [f"arn:aws:events:us-east-1:000000000000:rule/gpufleet-dev-{event}" for event in EVENTS]
    assert "AlarmsPublish" not in statements
    assert "AlarmsPublish" in deploy(config=ALARM).policy("Key")


def test_a_node_may_do_nothing_beyond_its_stack() -> None:
    """Each statement names this stack's resources; those that cannot have a condition or are channels."""
    policy = node_policy(NAMES, key_arn="arn:aws:kms:us-east-1:123456789012:key/k")
    unscoped = {"FindPeers", "PublishMetrics", "SessionManagerChannels"}
    for statement in policy["Statement"]:
        sid = statement["Sid"]
        assert statement["Effect"] == "Allow"
        assert "NotAction" not in statement and "NotResource" not in statement
        assert not any("*" in action for action in actions(statement)), f"{sid} has a wildcard action"
        if sid in unscoped:
            continue
        for arn in resources(statement):
            assert arn != "*", f"{sid} is not scoped"
            assert ("gpufleet-dev" in arn or "/gpufleet/dev" in arn) or sid in (
                "UseKeyThroughServices",
                "SessionManagerRegisters",
            ), f"{sid}: {arn} is not this stack's"
    by_sid = {statement["Sid"]: statement for statement in policy["Statement"]}
    assert set(actions(by_sid["FindPeers"])) == {
        "ec2:DescribeInstances",
        "autoscaling:DescribeAutoScalingGroups",
    }
    assert by_sid["PublishMetrics"]["Condition"] == {"StringEquals": {"cloudwatch:namespace": "gpufleet/dev"}}
    assert by_sid["ReportRun"] == {
        "Sid": "ReportRun",
        "Effect": "Allow",
        "Action": "s3:PutObject",
        "Resource": "arn:aws:s3:::gpufleet-dev-123456789012-us-east-1/control/nodes/*",
    }
    assert all(action.startswith("ssmmessages:") for action in actions(by_sid["SessionManagerChannels"]))
    assert by_sid["UseKeyThroughServices"]["Resource"] == "arn:aws:kms:us-east-1:123456789012:key/k"
    assert by_sid["UseKeyThroughServices"]["Condition"] == {
        "StringEquals": {"kms:ViaService": ["s3.us-east-1.amazonaws.com", "ssm.us-east-1.amazonaws.com"]}
    }
    assert resources(by_sid["KeepCheckpoints"]) == ["arn:aws:s3:::gpufleet-dev-123456789012-us-east-1/checkpoints/*"]
    assert resources(by_sid["ActInOwnGroup"]) == [
        "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/gpufleet-dev-nodes"
    ]


def test_what_a_node_must_never_be_allowed() -> None:
    """Not by any statement: other versions of checkpoints, the fleet's size, roles, keys, instances."""
    allowed = {action for statement in node_policy(NAMES, key_arn="k")["Statement"] for action in actions(statement)}
    for action in (
        "s3:DeleteObjectVersion",
        "s3:PutBucketPolicy",
        "autoscaling:UpdateAutoScalingGroup",
        "autoscaling:SetDesiredCapacity",
        "iam:PassRole",
        "kms:CreateGrant",
        "ec2:RunInstances",
        "ec2:TerminateInstances",
        "ssm:SendCommand",
        # The controller reads the events and sets the size; a node that could would hide its own interruption.
        "sqs:ReceiveMessage",
        "sqs:DeleteMessage",
    ):
        assert action not in allowed


# What boto3's calls of bootstrap.training.stores and the metrics publisher come down to.
PYTHON_CALLS = {
    "s3:PutObject",
    "s3:AbortMultipartUpload",
    "s3:GetObject",
    "s3:ListBucket",
    "s3:DeleteObject",
    "cloudwatch:PutMetricData",
}
# Not the bootstrap's: training code reads its secrets, Session Manager's agent is part of the image.
OTHERS = ("ssm:", "ssmmessages:", "kms:")


def test_a_node_may_do_what_its_scripts_do_and_nothing_more(repository: Path) -> None:
    """Each call of the AWS CLI has its permission, and each permission its call: a missing one shows on a paid node."""
    called = {"s3:GetObject"}  # aws s3 cp from the bucket
    for path in (repository / "bootstrap").rglob("*.sh"):
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        for service, operation in re.findall(r"\b(autoscaling|ec2|logs|s3api|cloudwatch) ([a-z]+(?:-[a-z]+)+) ", text):
            action = "".join(word.capitalize() for word in operation.split("-"))
            # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html
            called.add(f"{service.removesuffix('api')}:{action}".replace("s3:Head", "s3:Get"))
    assert len(called) > 8
    policy = node_policy(NAMES, key_arn="k", workers=True)
    allowed = {action for statement in policy["Statement"] for action in actions(statement)}
    assert {action for action in allowed if not action.startswith(OTHERS)} == called | PYTHON_CALLS


def test_only_a_worker_may_hold_on_to_itself() -> None:
    """A gang's nodes could otherwise outlast the ceiling, whatever the controller does."""
    assert "SetInstanceProtection" not in deploy().one("RolePolicy", "-node")["policy"]
    assert "SetInstanceProtection" in deploy(WORKERS, workers()).one("RolePolicy", "-node")["policy"]


def test_the_deployed_role_has_exactly_that_policy() -> None:
    stack = deploy()
    names = Names(stack="dev", account_id="000000000000", region="us-east-1", partition="aws")
    expected = node_policy(names, key_arn="arn:aws:kms:::gpufleet-dev-key")
    assert json.loads(stack.one("RolePolicy", "-node")["policy"]) == expected
    assert not stack.all("RolePolicyAttachment") and "managedPolicyArns" not in stack.one("Role", "-node")
    trust = json.loads(stack.one("Role", "-node")["assumeRolePolicy"])["Statement"]
    assert [statement["Principal"] for statement in trust] == [{"Service": "ec2.amazonaws.com"}]
    assert stack.one("LaunchTemplate")["iamInstanceProfile"] == {"arn": "arn:aws:iam:::gpufleet-dev-node"}


def test_efa_may_talk_within_the_group_both_ways_and_nobody_comes_in() -> None:
    stack = deploy()
    group = "gpufleet-dev-nodes-id"
    inside = [rule.inputs for rule in stack.all("SecurityGroupIngressRule") if rule.inputs["securityGroupId"] == group]
    assert len(inside) == 1
    assert (inside[0]["ipProtocol"], inside[0]["referencedSecurityGroupId"]) == ("-1", group)
    out = {rule.name: rule.inputs for rule in stack.all("SecurityGroupEgressRule")}
    to_nodes = out.pop("gpufleet-dev-to-nodes")
    assert (to_nodes["ipProtocol"], to_nodes["referencedSecurityGroupId"]) == ("-1", group)
    assert {(rule["ipProtocol"], rule["fromPort"], rule["toPort"]) for rule in out.values()} == {("tcp", 443, 443)}
    assert out["gpufleet-dev-to-s3"]["prefixListId"] == "pl-00000000"
    assert out["gpufleet-dev-to-endpoints"]["referencedSecurityGroupId"] == "gpufleet-dev-endpoints-id"
    assert len(out) == 2


@pytest.mark.parametrize("config", [{}, EXISTING_VPC], ids=["own", "existing"])
def test_no_rule_lets_the_outside_in(config: dict[str, str]) -> None:
    stack = deploy(config=config)
    for rule in stack.all("SecurityGroupIngressRule"):
        assert "cidrIpv6" not in rule.inputs
        assert rule.inputs.get("cidrIpv4", "10.42.0.0/16") == "10.42.0.0/16"
        assert "prefixListId" not in rule.inputs
    for group in stack.all("SecurityGroup"):
        assert not group.inputs.get("ingress") and not group.inputs.get("egress")
        assert not str(group.inputs.get("name", group.name)).startswith("sg-")


def test_in_an_existing_vpc_only_https_goes_out() -> None:
    (rule,) = [r for r in deploy(config=EXISTING_VPC).all("SecurityGroupEgressRule") if r.name.endswith("to-https")]
    assert (rule.inputs["cidrIpv4"], rule.inputs["fromPort"], rule.inputs["toPort"]) == ("0.0.0.0/0", 443, 443)


def test_the_service_roles_statements_are_those_of_the_aws_page() -> None:
    document = key_policy(NAMES, service_role_arn="arn:role", alarms=False)
    (use,) = [s for s in document["Statement"] if s["Sid"] == "AutoScalingUsesKey"]
    assert set(use["Action"]) == {
        "kms:Encrypt",
        "kms:Decrypt",
        "kms:ReEncrypt*",
        "kms:GenerateDataKey*",
        "kms:DescribeKey",
    }
