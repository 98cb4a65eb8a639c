"""The policies as code hold for every variant of the program, and each of them fails when what it guards is broken."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infra.offline import guardrails
from infra.offline.guardrails import Declared, violations
from infra.offline.preview import Resource, resources
from infra.settings import ConfigError
from tests.infra.deployed import (
    ALARM,
    EXISTING_VPC,
    LONE_NODE,
    WORKERS,
    capacity_block,
    deploy,
    on_demand,
    reserved,
    workers,
)
from tests.plans import sample_plan

FULL = {**ALARM, "gpufleet:nat": "true"}
EKS = {
    "gpufleet:platform": "eks",
    "gpufleet:eks": json.dumps({"adminArns": ["arn:aws:iam::000000000000:role/ml"]}),
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "spot": ({}, ALARM),
    "on-demand": (on_demand(), ALARM),
    "reserved": (reserved(), ALARM),
    "existing reservation": (reserved("cr-0123456789abcdef0"), ALARM),
    "capacity block": (capacity_block(), ALARM),
    "lone node": (LONE_NODE, {}),
    "nat": ({}, FULL),
    "existing vpc": ({}, EXISTING_VPC),
    "force destroy": ({}, {"gpufleet:forceDestroy": "true"}),
    "workers": (WORKERS, {**workers(scaling={"minNodes": 1, "gpuUtilizationPercent": 60}), **ALARM}),
    "eks": (on_demand(), {**EKS, **FULL}),
}


@cache
def variant_of_program(name: str) -> list[Resource]:
    changes, config = VARIANTS[name]
    return deploy(changes, config).found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_keeps_every_rule(variant: str) -> None:
    assert [str(found) for found in violations(variant_of_program(variant))] == []


@pytest.fixture
def stack() -> list[Resource]:
    return variant_of_program("nat")


def with_changes(
    before: list[Resource], kind: str, ending: str, change: Callable[[dict[str, Any]], None]
) -> list[Resource]:
    """The resources, with the arguments of one changed in place by ``change``."""
    found = []
    changed = 0
    for resource in before:
        if resource.kind == kind and resource.name.endswith(ending):
            inputs = copy.deepcopy(dict(resource.inputs))
            change(inputs)
            resource = replace(resource, inputs=inputs)
            changed += 1
        found.append(resource)
    assert changed == 1, f"{changed} resources are a {kind} ending with {ending!r}"
    return found


def setting(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    """A change that sets one argument, or (None) leaves it out."""

    def change(inputs: Any) -> None:
        for step in path[:-1]:
            inputs = inputs[step]
        if to is None:
            del inputs[path[-1]]
        else:
            inputs[path[-1]] = to

    return change


def allowing(argument: str, sid: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one statement of a policy; None leaves a key out."""

    def change(inputs: dict[str, Any]) -> None:
        document = json.loads(inputs[argument])
        (statement,) = [each for each in document["Statement"] if each.get("Sid", "") == sid]
        statement.update(changes)
        for key in [key for key, value in statement.items() if value is None]:
            del statement[key]
        inputs[argument] = json.dumps(document)

    return change


def telling(secret: str) -> Callable[[dict[str, Any]], None]:
    """A change that puts a line into the user data."""

    def change(inputs: dict[str, Any]) -> None:
        text = base64.b64decode(inputs["userData"]) + f"\n{secret}\n".encode()
        inputs["userData"] = base64.b64encode(text).decode()

    return change


# Made up here, so that no scanner takes this file for a leak.
AWS_KEY = "AKIA" + "Q3EGRMKV5XYZ2345"
RANDOM_TOKEN = "q7Rz" + "Xw3LmPk9TbYc" + "N2vHsJ8dFgUeA5oK" + "1iMxQ6"
EVERYBODY = {"Principal": {"AWS": "*"}}

# Rule, type, ending of the name, and what breaks it.
MUTATIONS: dict[str, tuple[str, str, str, Callable[[dict[str, Any]], None]]] = {
    "volume unencrypted": (
        "encrypted_at_rest",
        "LaunchTemplate",
        "",
        setting("blockDeviceMappings", 0, "ebs", "encrypted", to="false"),
    ),
    "volume under AWS's key": (
        "encrypted_at_rest",
        "LaunchTemplate",
        "",
        setting("blockDeviceMappings", 0, "ebs", "kmsKeyId", to=None),
    ),
    "bucket under AWS's key": (
        "encrypted_at_rest",
        "BucketServerSideEncryptionConfiguration",
        "",
        setting("rules", 0, "applyServerSideEncryptionByDefault", "sseAlgorithm", to="AES256"),
    ),
    "object without key": ("encrypted_at_rest", "BucketObjectv2", "-bootstrap", setting("kmsKeyId", to=None)),
    "queue without key": ("encrypted_at_rest", "Queue", "-node-events", setting("kmsMasterKeyId", to=None)),
    "topic without key": ("encrypted_at_rest", "Topic", "", setting("kmsMasterKeyId", to=None)),
    "flow logs without key": ("encrypted_at_rest", "LogGroup", "-flow", setting("kmsKeyId", to=None)),
    "IMDSv1": ("metadata_needs_a_token", "LaunchTemplate", "", setting("metadataOptions", "httpTokens", to="optional")),
    "two hops": (
        "metadata_needs_a_token",
        "LaunchTemplate",
        "",
        setting("metadataOptions", "httpPutResponseHopLimit", to=2),
    ),
    "public subnet": ("nothing_is_public", "Subnet", "-use1-az2", setting("mapPublicIpOnLaunch", to=True)),
    "public address": (
        "nothing_is_public",
        "LaunchTemplate",
        "",
        setting("networkInterfaces", 0, "associatePublicIpAddress", to="true"),
    ),
    "SSH key": ("nothing_is_public", "LaunchTemplate", "", setting("keyName", to="mine")),
    "bucket block lifted": ("nothing_is_public", "BucketPublicAccessBlock", "", setting("blockPublicPolicy", to=False)),
    "way in": (
        "nothing_is_public",
        "SecurityGroupIngressRule",
        "-endpoints-https",
        setting("cidrIpv4", to="0.0.0.0/0"),
    ),
    "way in by IPv6": ("nothing_is_public", "SecurityGroupIngressRule", "-from-nodes", setting("cidrIpv6", to="::/0")),
    "inline rule": ("nothing_is_public", "SecurityGroup", "-nodes", setting("ingress", to=[{"fromPort": 22}])),
    "way out by any port": ("nothing_is_public", "SecurityGroupEgressRule", "-to-https", setting("toPort", to=65535)),
    "nodes in the public subnet": (
        "nothing_is_public",
        "Group",
        "",
        setting("vpcZoneIdentifiers", to=["gpufleet-dev-public-id"]),
    ),
    "action *": ("no_wildcards", "RolePolicy", "-node", allowing("policy", "ReadBootstrap", Action="*")),
    "action s3:*": ("no_wildcards", "RolePolicy", "-node", allowing("policy", "ReadBootstrap", Action=["s3:*"])),
    "resource *": ("no_wildcards", "RolePolicy", "-node", allowing("policy", "ReadBootstrap", Resource="*")),
    "another stack's bucket": (
        "no_wildcards",
        "RolePolicy",
        "-node",
        allowing("policy", "ReadBootstrap", Resource="arn:aws:s3:::gpufleet-devil-000000000000-us-east-1/*"),
    ),
    "all stacks that begin alike": (
        "no_wildcards",
        "RolePolicy",
        "-flow",
        allowing("policy", "WriteFlowLogs", Resource="arn:aws:logs:us-east-1:000000000000:log-group:/gpufleet/dev*"),
    ),
    "NotAction": (
        "no_wildcards",
        "RolePolicy",
        "-node",
        allowing("policy", "ReadBootstrap", Action=None, NotAction="iam:*"),
    ),
    "NotResource": (
        "no_wildcards",
        "RolePolicy",
        "-node",
        allowing("policy", "ReadBootstrap", Resource=None, NotResource="arn:aws:s3:::other"),
    ),
    "key for anything": ("no_wildcards", "Key", "", allowing("policy", "AutoScalingUsesKey", Action="kms:*")),
    "AWS's policy": (
        "no_wildcards",
        "Role",
        "-node",
        setting("managedPolicyArns", to=["arn:aws:iam::aws:policy/AdministratorAccess"]),
    ),
    "key for everybody": ("principals_are_narrow", "Key", "", allowing("policy", "AutoScalingUsesKey", **EVERYBODY)),
    "key for any account's logs": (
        "principals_are_narrow",
        "Key",
        "",
        allowing("policy", "LogsEncryptsGroup", Condition=None),
    ),
    "queue for everybody": (
        "principals_are_narrow",
        "Queue",
        "-node-events",
        allowing("policy", "RulesSend", Principal="*"),
    ),
    "queue for any account's rules": (
        "principals_are_narrow",
        "Queue",
        "-node-events",
        allowing("policy", "RulesSend", Condition=None),
    ),
    "topic for any account's alarms": (
        "principals_are_narrow",
        "TopicPolicy",
        "",
        allowing("policy", "AlarmsPublish", Condition=None),
    ),
    "trust of any account's flow logs": (
        "principals_are_narrow",
        "Role",
        "-flow",
        allowing("assumeRolePolicy", "", Condition=None),
    ),
    "trust of everybody": (
        "principals_are_narrow",
        "Role",
        "-node",
        allowing("assumeRolePolicy", "", **EVERYBODY),
    ),
    "endpoint for everybody": (
        "principals_are_narrow",
        "VpcEndpoint",
        "-s3",
        allowing("policy", "OwnBuckets", Condition=None),
    ),
    "bucket over plain HTTP": (
        "only_tls",
        "BucketPolicy",
        "",
        allowing("policy", "OnlyTls", Condition={"Bool": {"aws:SecureTransport": "true"}}),
    ),
    "queue over plain HTTP": (
        "only_tls",
        "Queue",
        "-node-events",
        allowing("policy", "OnlyTls", Condition={"Bool": {"aws:SecureTransport": "true"}}),
    ),
    "topic over plain HTTP": ("only_tls", "TopicPolicy", "", allowing("policy", "OnlyTls", Principal={"AWS": "x"})),
    "untagged bucket": ("tagged", "Bucket", "", setting("tags", "gpufleet:stack", to=None)),
    "untagged NAT gateway": ("tagged", "NatGateway", "", setting("tags", to=None)),
    "untagged volumes": ("tagged", "LaunchTemplate", "", setting("tagSpecifications", 1, to=None)),
    "untagged instances": ("tagged", "Group", "", setting("tags", 0, "propagateAtLaunch", to=False)),
    "key that does not rotate": ("keys_rotate", "Key", "", setting("enableKeyRotation", to=False)),
    "unversioned bucket": (
        "checkpoints_are_protected",
        "BucketVersioning",
        "",
        setting("versioningConfiguration", "status", to="Suspended"),
    ),
    "AWS key": ("no_secrets", "LaunchTemplate", "", telling(f"export AWS_ACCESS_KEY_ID={AWS_KEY}")),
    "password": ("no_secrets", "LaunchTemplate", "", telling("DB_PASSWORD=correct-horse")),
    "Hugging Face token": ("no_secrets", "LaunchTemplate", "", telling("train.py --token hf_" + "a" * 34)),
    "private key": ("no_secrets", "LaunchTemplate", "", telling("-----BEGIN OPENSSH " + "PRIVATE KEY-----")),
    "random token": ("no_secrets", "LaunchTemplate", "", telling(f"login {RANDOM_TOKEN}")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_breaks_a_rule_is_found_by_that_rule_alone(stack: list[Resource], mutation: str) -> None:
    rule, kind, ending, change = MUTATIONS[mutation]
    found = violations(with_changes(stack, kind, ending, change))
    assert {violation.rule for violation in found} == {rule}


def test_every_rule_is_shown_to_fail() -> None:
    assert {rule for rule, *_ in MUTATIONS.values()} == {rule.__name__ for rule in guardrails.RULES}


@pytest.mark.parametrize("kind", ["Bucket", "BucketPolicy", "BucketPublicAccessBlock", "Key"])
def test_protection_that_is_lost_is_found(stack: list[Resource], kind: str) -> None:
    lost = [replace(each, protected=each.protected and each.kind != kind) for each in stack]
    (found,) = violations(lost)
    assert (found.rule, found.problem) == ("checkpoints_are_protected", "is not protected from destroy")


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
def test_a_guard_that_is_missing_is_found(stack: list[Resource], kind: str, rule: str) -> None:
    found = violations([each for each in stack if each.kind != kind])
    assert rule in {violation.rule for violation in found}


def declared(kind: str, **inputs: Any) -> list[Resource]:
    """One resource the program does not declare today."""
    module, name = kind.split(":")
    tags = {"Project": "gpufleet", "gpufleet:stack": "dev", "gpufleet:model": "m"}
    return [
        Resource(type=f"aws:{module}/x:{name}", name="x", parent="", inputs={"tags": tags, **inputs}, protected=True)
    ]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (declared("ec2:KeyPair"), "SSH key"),
        (declared("lambda:FunctionUrl"), "address on the internet"),
        (
            declared(
                "eks:Cluster", encryptionConfig={"resources": ["secrets"]}, vpcConfig={"endpointPublicAccess": False}
            ),
            "secrets",
        ),
        (declared("eks:Cluster", vpcConfig={}), "open to every address"),
        (
            declared("lambda:Function", environment={"variables": {"API_KEY": "abcdefgh"}}, kmsKeyArn="k"),
            "looks like a secret",
        ),
        (declared("lambda:Function", environment={"variables": {"A": "b"}}), "not encrypted"),
        (declared("lambda:Permission", principal="events.amazonaws.com"), "whoever it acts for"),
        (declared("ssm:Parameter", type="String"), "not a SecureString"),
        (declared("iam:RolePolicyAttachment", policyArn="arn:aws:iam::aws:policy/PowerUserAccess"), "PowerUserAccess"),
        (declared("rds:Instance"), "nobody has said whether this type holds data"),
    ],
)
def test_what_the_program_does_not_have_today_would_be_found(found: list[Resource], problem: str) -> None:
    assert any(problem in violation.problem for violation in violations(found))


def test_a_command_with_a_secret_is_refused_before_anybody_can_read_it() -> None:
    with pytest.raises(ConfigError, match=r"what looks like a secret, hf_aaaaa\.\.\..*below /gpufleet/dev/"):
        deploy(config={"gpufleet:trainCommand": "train.py --token hf_" + "a" * 34})


def test_the_longest_names_keep_the_rules_too() -> None:
    stack = "A.Stack_with-the-longest-name-that-Pulumi-takes-" + "x" * 52
    found = resources(sample_plan(), stack=stack, config=FULL)
    assert [str(violation) for violation in violations(found)] == []
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html, all inline policies of a role together
    policies = [each.inputs["policy"] for each in found if each.kind == "RolePolicy"]
    assert all(len("".join(policy.split())) < 10_240 for policy in policies)


def test_a_reviewer_reads_of_every_exception(repository: Path) -> None:
    page = (repository / "docs/security.md").read_text()
    excused = {**guardrails.BEYOND_THE_STACK, **guardrails.OPEN_ENDPOINT_STATEMENTS, **guardrails.MANAGED_POLICIES}
    assert [name for name in excused if f"`{name}`" not in page] == []


def test_every_reason_is_of_a_statement_that_exists() -> None:
    """An exception that nothing needs any more would let the next mistake through."""
    sids = {
        statement.get("Sid")
        for variant in VARIANTS
        for _, kind, statement in guardrails._statements(Declared(resources=variant_of_program(variant)))
        if kind in ("role", "endpoint")
    }
    assert set(guardrails.BEYOND_THE_STACK) | set(guardrails.OPEN_ENDPOINT_STATEMENTS) <= sids
    everything = [each for variant in VARIANTS for each in variant_of_program(variant)]
    attached = {each.inputs.get("policyArn", "").rpartition("/")[2] for each in everything}
    assert set(guardrails.MANAGED_POLICIES) <= attached
    assert all(any(each.name.endswith(name) for each in everything) for name in guardrails.VOLUMES_UNDER_ACCOUNT_KEY)
    trusted = {
        statement["Principal"].get("Service")
        for _, kind, statement in guardrails._statements(Declared(resources=everything))
        if kind == "trust" and "Condition" not in statement
    }
    assert trusted == guardrails.TRUSTED_WITHOUT_SOURCE
