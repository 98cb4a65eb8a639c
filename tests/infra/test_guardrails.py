"""Every variant of the program keeps every guardrail, and each guardrail fails when a resource breaks it."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.offline import guardrails
from infra.offline.guardrails import RULES, Declared, violations
from infra.offline.preview import Resource, resources
from infra.settings import ConfigError
from tests.infra.deployed import FULL, VARIANTS, deploy, variant
from tests.plans import sample_plan

Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_keeps_every_rule(name: str) -> None:
    assert [str(violation) for violation in violations(variant(name))] == []


@pytest.fixture
def stack() -> list[Resource]:
    return variant("nat")


def with_changes(before: list[Resource], kind: str, ending: str, change: Change) -> list[Resource]:
    """The resources, with the arguments of one of them changed by ``change``."""
    (target,) = [resource for resource in before if resource.kind == kind and resource.name.endswith(ending)]
    inputs = copy.deepcopy(dict(target.inputs))
    change(inputs)
    return [replace(resource, inputs=inputs) if resource is target else resource for resource in before]


def setting(*path: str | int, to: Any) -> Change:
    """A change that sets one argument, or removes the argument (None)."""

    def change(inputs: Any) -> None:
        for step in path[:-1]:
            inputs = inputs[step]
        if to is None:
            del inputs[path[-1]]
        else:
            inputs[path[-1]] = to

    return change


def allowing(sid: str, *, argument: str = "policy", **changes: Any) -> Change:
    """A change of one statement of a policy; None removes a key."""

    def change(inputs: dict[str, Any]) -> None:
        document = json.loads(inputs[argument])
        (statement,) = [entry for entry in document["Statement"] if entry.get("Sid", "") == sid]
        statement.update(changes)
        for key in [key for key, value in statement.items() if value is None]:
            del statement[key]
        inputs[argument] = json.dumps(document)

    return change


def telling(secret: str) -> Change:
    """A change that appends a line to the user data."""

    def change(inputs: dict[str, Any]) -> None:
        text = base64.b64decode(inputs["userData"]) + f"\n{secret}\n".encode()
        inputs["userData"] = base64.b64encode(text).decode()

    return change


# Assembled here, so that no scanner takes this file for a leak.
AWS_KEY = "AKIA" + "Q3EGRMKV5XYZ2345"
RANDOM_TOKEN = "q7Rz" + "Xw3LmPk9TbYc" + "N2vHsJ8dFgUeA5oK" + "1iMxQ6"
EVERYBODY: dict[str, Any] = {"Principal": {"AWS": "*"}}
PLAIN_HTTP = {"Bool": {"aws:SecureTransport": "true"}}
LOGS = "arn:aws:logs:us-east-1:000000000000:log-group:/gpufleet"

# Changes that break a rule, by rule: type and ending of the name of the changed resource, and the change.
MUTATIONS: dict[str, dict[str, tuple[str, str, Change]]] = {
    "encrypted_at_rest": {
        "volume unencrypted": ("LaunchTemplate", "", setting("blockDeviceMappings", 0, "ebs", "encrypted", to="false")),
        "volume under AWS's key": ("LaunchTemplate", "", setting("blockDeviceMappings", 0, "ebs", "kmsKeyId", to=None)),
        "bucket under AWS's key": (
            "BucketServerSideEncryptionConfiguration",
            "",
            setting("rules", 0, "applyServerSideEncryptionByDefault", "sseAlgorithm", to="AES256"),
        ),
        "object without key": ("BucketObjectv2", "-bootstrap", setting("kmsKeyId", to=None)),
        "open queue": ("Queue", "-node-events", setting("sqsManagedSseEnabled", to=False)),
        "topic without key": ("Topic", "", setting("kmsMasterKeyId", to=None)),
        "flow logs without key": ("LogGroup", "-flow", setting("kmsKeyId", to=None)),
    },
    "metadata_needs_a_token": {
        "IMDSv1": ("LaunchTemplate", "", setting("metadataOptions", "httpTokens", to="optional")),
        "two hops": ("LaunchTemplate", "", setting("metadataOptions", "httpPutResponseHopLimit", to=2)),
    },
    "nothing_is_public": {
        "public subnet": ("Subnet", "-use1-az2", setting("mapPublicIpOnLaunch", to=True)),
        "public address": (
            "LaunchTemplate",
            "",
            setting("networkInterfaces", 0, "associatePublicIpAddress", to="true"),
        ),
        "SSH key": ("LaunchTemplate", "", setting("keyName", to="mine")),
        "bucket block lifted": ("BucketPublicAccessBlock", "", setting("blockPublicPolicy", to=False)),
        "open to every address": ("SecurityGroupIngressRule", "-endpoints-https", setting("cidrIpv4", to="0.0.0.0/0")),
        "open by IPv6": ("SecurityGroupIngressRule", "-from-nodes", setting("cidrIpv6", to="::/0")),
        "inline rule": ("SecurityGroup", "-nodes", setting("ingress", to=[{"fromPort": 22}])),
        "out by any port": ("SecurityGroupEgressRule", "-to-https", setting("toPort", to=65535)),
        "nodes in the public subnet": ("Group", "", setting("vpcZoneIdentifiers", to=["gpufleet-dev-public-id"])),
    },
    "no_wildcards": {
        "action *": ("RolePolicy", "-node", allowing("ReadBootstrap", Action="*")),
        "action s3:*": ("RolePolicy", "-node", allowing("ReadBootstrap", Action=["s3:*"])),
        "resource *": ("RolePolicy", "-node", allowing("ReadBootstrap", Resource="*")),
        "another stack's bucket": (
            "RolePolicy",
            "-node",
            allowing("ReadBootstrap", Resource="arn:aws:s3:::gpufleet-devil-000000000000-us-east-1/*"),
        ),
        "stacks that begin alike": ("RolePolicy", "-flow", allowing("WriteFlowLogs", Resource=f"{LOGS}/dev*")),
        "NotAction": ("RolePolicy", "-node", allowing("ReadBootstrap", Action=None, NotAction="iam:*")),
        "NotResource": (
            "RolePolicy",
            "-node",
            allowing("ReadBootstrap", Resource=None, NotResource="arn:aws:s3:::other"),
        ),
        "key for anything": ("Key", "", allowing("AutoScalingUsesKey", Action="kms:*")),
        "AWS's policy": (
            "Role",
            "-node",
            setting("managedPolicyArns", to=["arn:aws:iam::aws:policy/AdministratorAccess"]),
        ),
    },
    "principals_are_narrow": {
        "key for everybody": ("Key", "", allowing("AutoScalingUsesKey", **EVERYBODY)),
        "key for any account's logs": ("Key", "", allowing("LogsEncryptsGroup", Condition=None)),
        "queue for everybody": ("Queue", "-node-events", allowing("RulesSend", Principal="*")),
        "queue for any account's rules": ("Queue", "-node-events", allowing("RulesSend", Condition=None)),
        "topic for any account's alarms": ("TopicPolicy", "", allowing("AlarmsPublish", Condition=None)),
        "any account's flow logs": ("Role", "-flow", allowing("", argument="assumeRolePolicy", Condition=None)),
        "trust of everybody": ("Role", "-node", allowing("", argument="assumeRolePolicy", **EVERYBODY)),
        "endpoint for everybody": ("VpcEndpoint", "-s3", allowing("OwnBuckets", Condition=None)),
    },
    "only_tls": {
        "bucket over plain HTTP": ("BucketPolicy", "", allowing("OnlyTls", Condition=PLAIN_HTTP)),
        "queue over plain HTTP": ("Queue", "-node-events", allowing("OnlyTls", Condition=PLAIN_HTTP)),
        "topic over plain HTTP": ("TopicPolicy", "", allowing("OnlyTls", Principal={"AWS": "x"})),
    },
    "tagged": {
        "untagged bucket": ("Bucket", "", setting("tags", "gpufleet:stack", to=None)),
        "untagged NAT gateway": ("NatGateway", "", setting("tags", to=None)),
        "untagged volumes": ("LaunchTemplate", "", setting("tagSpecifications", 1, to=None)),
        "untagged instances": ("Group", "", setting("tags", 0, "propagateAtLaunch", to=False)),
    },
    "keys_rotate": {"key that does not rotate": ("Key", "", setting("enableKeyRotation", to=False))},
    "checkpoints_are_protected": {
        "unversioned bucket": ("BucketVersioning", "", setting("versioningConfiguration", "status", to="Suspended"))
    },
    "no_secrets": {
        "AWS key": ("LaunchTemplate", "", telling(f"export AWS_ACCESS_KEY_ID={AWS_KEY}")),
        "password": ("LaunchTemplate", "", telling("DB_PASSWORD=correct-horse")),
        "Hugging Face token": ("LaunchTemplate", "", telling("train.py --token hf_" + "a" * 34)),
        "private key": ("LaunchTemplate", "", telling("-----BEGIN OPENSSH " + "PRIVATE KEY-----")),
        "random token": ("LaunchTemplate", "", telling(f"login {RANDOM_TOKEN}")),
    },
}


@pytest.mark.parametrize(
    ("rule", "mutation"), [(rule, name) for rule, changes in MUTATIONS.items() for name in changes]
)
def test_a_change_that_breaks_a_rule_breaks_that_rule_alone(stack: list[Resource], rule: str, mutation: str) -> None:
    assert {violation.rule for violation in violations(with_changes(stack, *MUTATIONS[rule][mutation]))} == {rule}


def test_every_rule_is_shown_to_fail() -> None:
    assert MUTATIONS.keys() == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("kind", ["Bucket", "BucketPolicy", "BucketPublicAccessBlock", "Key"])
def test_lost_protection_is_a_violation(stack: list[Resource], kind: str) -> None:
    lost = [replace(resource, protected=resource.protected and resource.kind != kind) for resource in stack]
    (violation,) = violations(lost)
    assert (violation.rule, violation.breach) == (
        "checkpoints_are_protected",
        "is not protected from `pulumi destroy`",
    )


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("BucketServerSideEncryptionConfiguration", "encrypted_at_rest"),
        ("BucketPublicAccessBlock", "nothing_is_public"),
        ("BucketPolicy", "only_tls"),
        ("TopicPolicy", "only_tls"),
        ("NatGateway", "nothing_is_public"),
    ],
)
def test_a_missing_guard_is_a_violation(stack: list[Resource], kind: str, rule: str) -> None:
    broken = violations([resource for resource in stack if resource.kind != kind])
    assert rule in {violation.rule for violation in broken}


@pytest.mark.parametrize(
    ("kind", "inputs", "breach"),
    [
        ("ec2:KeyPair", {}, "SSH key"),
        ("lambda:FunctionUrl", {}, "address on the internet"),
        (
            "lambda:Function",
            {"environment": {"variables": {"API_KEY": "abcdefgh"}}, "kmsKeyArn": "k"},
            "possible secret",
        ),
        ("lambda:Function", {"environment": {"variables": {"A": "b"}}}, "does not encrypt environment variables"),
        ("lambda:Permission", {"principal": "events.amazonaws.com"}, "without a condition on its source"),
        ("ssm:Parameter", {"type": "String"}, "not a SecureString"),
        ("iam:RolePolicyAttachment", {"policyArn": "arn:aws:iam::aws:policy/PowerUserAccess"}, "PowerUserAccess"),
        ("rds:Instance", {}, "has no row in resource_types.py"),
    ],
)
def test_a_resource_that_the_program_does_not_declare_yet_is_checked(
    kind: str, inputs: dict[str, Any], breach: str
) -> None:
    module, name = kind.split(":")
    tags = {"Project": "gpufleet", "gpufleet:stack": "dev", "gpufleet:model": "m"}
    resource = Resource(
        type=f"aws:{module}/x:{name}", name="x", parent="", inputs={"tags": tags, **inputs}, protected=True
    )
    assert any(breach in violation.breach for violation in violations([resource]))


def test_a_command_with_a_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"what looks like a secret, hf_aaaaa\.\.\..*below /gpufleet/dev/"):
        deploy(config={"gpufleet:trainCommand": "train.py --token hf_" + "a" * 34})


def test_the_longest_stack_name_keeps_the_rules() -> None:
    name = "A.Stack_with-the-longest-name-that-Pulumi-takes-" + "x" * 52
    assert [str(violation) for violation in violations(resources(sample_plan(), stack=name, config=FULL))] == []


def test_docs_name_every_exception(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    excused = guardrails.BEYOND_THE_STACK | guardrails.OPEN_ENDPOINT_STATEMENTS
    assert [name for name in excused if f"`{name}`" not in page] == []


def test_every_exception_is_needed() -> None:
    """An exception that nothing needs would let the next mistake through."""
    everything = [resource for name in VARIANTS for resource in variant(name)]
    statements = list(Declared(resources=everything).statements())
    sids = {statement.get("Sid") for _, kind, statement in statements if kind in ("role", "endpoint")}
    assert guardrails.BEYOND_THE_STACK.keys() | guardrails.OPEN_ENDPOINT_STATEMENTS.keys() <= sids
    trusted = {
        statement["Principal"]["Service"]
        for _, kind, statement in statements
        if kind == "trust" and "Condition" not in statement and "Service" in statement["Principal"]
    }
    assert trusted == guardrails.TRUSTED_WITHOUT_SOURCE
